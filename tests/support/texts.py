"""Texts that tokenizers disagree about."""

from __future__ import annotations

CORPUS = [
    "The capital of France is",
    "   42",
    "1234567890 3.14159 1,000,000 2026-11-29T22:21:04Z",
    "x  12   345    6789\t10\n\n11 \n 12",
    "½ ⅓ ² ³ ① ㊿ Ⅷ ٤٢ १२३ ４２",
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x)]  # 0x1F, 1e-5\n",
    "#include <stdio.h>\nint main(void) {\n\tprintf(\"%d\\n\", 'a');\n\treturn 0;\n}\n",
    "SELECT * FROM t WHERE a>=1 AND b!='x'; -- comment\r\n",
    '{"key": [1, 2.5e10, null, true], "ключ": "значение"}',
    "👍🏽 👨‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 😀😀 ☃ ©",
    "日本語のテキストと漢字かな交じり文。中文测试：你好，世界！ 한국어 문장입니다.",
    "مرحبا بالعالم، هذا نص عربي ١٢٣ مع تشكيلٌ. שלום עולם",
    "नमस्ते दुनिया ไทย ភាសាខ្មែរ Ελληνικά Русский Türkçe İı",
    "e\u0301 é a\u0308 ä ﬁ Å \u212b",  # composed and decomposed
    "it's we've I'll they'd IT'S WE'VE don't'll ’s",
    "\x00\x01\x07\x1b[31mred\x1b[0m\x7f\x80\u200b\u200d\ufeff\u2028\u2029\u00a0\u3000end",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_start|><|im_end|> <|im_end |> <|im_start <im_start> |im_end|>",
    "<s></s>[INST] <unk> <pad> <|eot_id|> <repo_name> <file_sep> <jupyter_start>",
    " leading",
    "trailing   ",
    "   ",
    "\n",
    "\t\t\n \n",
    "",
    "a" * 300,
    "=" * 80 + "-" * 33 + "....!!!???",
    "word" * 40 + " " * 40 + "word",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 🜁 \U0010ffff \ufffd",
    "mixedCASE snake_case kebab-case 50% $3.50 a@b.c https://example.org/?q=1&r=%20#x",
]
"""Code, numbers after runs of spaces, emoji, CJK, Arabic, control and special-looking text."""
