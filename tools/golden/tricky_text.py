"""Text on which tokenizers disagree, and text for training small vocabularies; randomness is seeded."""

# ruff: noqa: RUF001  # this file needs letters that look like others

from __future__ import annotations

import random

TRAINING = """
The quick brown fox jumps over the lazy dog, and it doesn't stop: they've seen it, we're sure, I'd say you'll see too.
I was charged twice for my subscription last week. Could you please refund the second payment of $1,234.56 to my card?
My login page shows a 502 Bad Gateway error after the latest release; the log says "connection refused" at 10:45:07.
Is a binding arbitration clause enforceable under California consumer law? It depends on the contract and the court.
def add(first, second):\n    total = first + second\n    if total > 100:\n        return None\n    return total\n
for (int i = 0; i < 10; i++) { printf("%d\\n", i * i); }  // squares\n\t\tstd::vector<int> values = {1, 2, 3};\n
Die Größe der Straße überrascht die Bürger, denn früher war sie für Fußgänger schöner. Äpfel, Öl und Übung.
L'été dernier, nous avons mangé des crêpes à la fête du village; où êtes-vous allés? Ça dépend du château.
El niño pequeño comió mañana una piña; ¿cuándo llegará el autobús? ¡Qué bonito día hace en España!
Съешь же ещё этих мягких французских булок, да выпей чаю. Привет, мир! Как дела сегодня?
今天天气很好，我们去公园散步吧。你好世界！这个模型可以回答问题。今天我们学习语言模型。
今日はとても良い天気ですね。こんにちは世界。このモデルは質問に答えます。カタカナとひらがな。
오늘 날씨가 정말 좋네요. 안녕하세요 세계! 이 모델은 질문에 답합니다.
हिन्दी में लिखना आसान है। नमस्ते दुनिया, आज मौसम अच्छा है।
العربية لغة جميلة جدا. مرحبا بالعالم! كيف حالك اليوم؟
Emoji 😀 😀 😂 👍 🎉 ❤️ and flags 🇩🇪 🇫🇷 with families 👨‍👩‍👧 appear here and there 😀.
Numbers 0 1 2 3 10 42 99 100 123 1000 1234 12345 2024 2025 3.14159 1e10 0x1F 1/2 50% 12:30 1,000,000.
"""

CASED = """fooBar fooBar MiXeD cAsE getValue XMLHttpRequest they've THEY'VE I'M he's a/b //
/c ÉcoleÉtat ПриветМир 1234567 a1b2 =>/
"""
"""Text for a vocabulary whose tokens cross the borders that differ between families."""

FRAGMENTS = (
    "hello", "Hello", " world", "the", " the", "don't", "I'M", "we'LL", "they've", "'s", "'S", " 's", "'",
    "''", "\"", "123", "1234567", " 42", "3.14", "1,000", "٣٤", "½", "²", "Ⅷ", "x²", "12ab34", " ", "  ",
    "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "  \n\n  ", "\u00a0", "\u3000", "\u200b", "\u2028", "é",
    "e\u0301", "ß", "Größe", "naïve", "Привет", "мир", "你好", "世界", "こんにちは", "カタカナ", "안녕",
    "नमस्ते", "مرحبا", "😀", "👍🏽", "👨‍👩‍👧", "🇩🇪", "❤️", "\ufe0f", "\U0001f9ff", "\U00010348", "\ufffd",
    "!", "!!!", "...", "…", "—", "-", "--", "_", "__init__", "()", "{}", "[0]", "<", ">", "</", "/>", "=>",
    "==", "&&", "#", "$", "%", "^", "~", "|", "\\", "\\n", "`", "@user", "http://a.b/c?d=e&f", "C++", "a_b",
    "fooBar", "\u2581", "\u0120", "<s>", "</s>", "<unk>", "<|begin|>", "<|end|>", "<|en", "<think>",
    "</think>", "<0x0A>", "<0xE2>", "\x00", "\x01", "\x7f",
)  # fmt: skip

_WHOLE = (
    "", "a", " a", "a ", "  a  ", "Hello, world!", "I'll we'd THEY'RE it's 'tis y'all'd've",
    "  leading and trailing  ", "tabs\tand\nnew\r\nlines\n\n\nend\n", "    indented\n        more\n\tend",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "                              ", "\n\n\n\n\n\n", "!!!!!!!!!!!!!!!!!",
    "0000000000000000", "▁▁a ▁ b", "ĠHello Ċ", "MiXeD cAsE wOrDs", "snake_case_and-kebab-case.and.dots",
    "1 22 333 4444 55555 666666", "price: $1,234.56 (50% off!)", "x=1;y=2;z=x+y//comment",
    "zażółć gęślą jaźń", "ｆｕｌｌ ｗｉｄｔｈ １２３", "\ufeffbyte order mark",
    "soft\u00adhyphen zero\u200bwidth", "a\u0300\u0301\u0302\u0303", "مرحبا ١٢٣ world",
    "<|begin|>user\nhello<|end|>\n<|begin|>assistant\n", "<|begin|><|begin|> <|end|>", "text<|end|>text",
    " <|end|> ", "<s>begin</s>", "<s> begin </s> ", "<think>\nhm\n</think>\n\nanswer", "a<think>b",
    "<think> <think>", "<unk> and <unk>", "<|begin", "|end|>", "<<|end|>>", "<|END|>", "unmergeable",
    " unmergeable", "unmergeable unmergeables", "👨‍👩‍👧 family 👍🏽 thumbs 🇩🇪🇫🇷 flags", "𝕳𝖊𝖑𝖑𝖔 𐍈 𠜎",
    "今天天气很好，我们去公园。", "カタカナとひらがなと漢字", "안녕하세요 세계",
)  # fmt: skip


def tricky_strings(count: int = 200, seed: int = 7) -> list[str]:
    """Distinct strings: the list above, every fragment in turn, then random combinations of fragments."""
    rng = random.Random(seed)
    strings = dict.fromkeys(_WHOLE)
    while len(strings) < count:
        strings["".join(rng.choices(FRAGMENTS, k=rng.randint(2, 9)))] = None
    return list(strings)
