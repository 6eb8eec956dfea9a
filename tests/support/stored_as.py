"""A GGUF file with its matrices stored in another format, for tests of quality."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support import super_blocks
from worker.loader.super_blocks import SUPER_BLOCKS


def stored_as(source: Path, kind: str, file: Path) -> Path:
    """Copies `source` with every matrix in `kind`; in Q8_0 where a row does not divide into blocks of `kind`."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(source)
    writer = GGUFWriter(file, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            outer, inner = field.types[0], field.types[-1]
            of = inner if outer == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), outer, sub_type=of)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim != 2:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        chosen = "Q8_0" if kind in SUPER_BLOCKS and values.shape[1] % super_blocks.SUPER_BLOCK else kind
        if chosen in SUPER_BLOCKS:
            data = super_blocks.quantise(values.astype(np.float32), chosen)
        else:
            data = quants.quantize(values.astype(np.float32), GGMLQuantizationType[chosen])
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
