"""Make tests/golden/sentence_transformers.npz: vectors and scores of tiny random models by sentence-transformers.

    python -m tools.golden.sentence_transformers

Needs the ``golden`` extra; made with sentence-transformers 6.2, transformers 5.24 and torch 2.13 on the CPU, in
float32. The models are rebuilt from a seed (tools/golden/vector_cases.py), so only results are stored.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.vector_cases import (
    CLASSIFIERS,
    EMBEDDERS,
    MAX_ANSWER_TOKENS,
    MESSAGES_TEMPLATE,
    NUM_SHORT_PAIRS,
    PAIR_TEMPLATE,
    PAIRS,
    PROMPTED,
    TEXTS,
    VectorCase,
    card_prompt,
    write_case,
    write_reranker,
)

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "sentence_transformers.npz"
INSTRUCTIONS = ("", "Find complaints about payments")


def vectors(path: Path, case: VectorCase) -> dict[str, Any]:
    """Vectors of all texts with the model's default prompt, of some with each prompt and with none, and cosines."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")
    found = {"": model.encode(list(TEXTS))}
    some = [TEXTS[index] for index in PROMPTED]
    for name in case.prompts:
        found[f".{name}"] = model.encode(some, prompt_name=name)
    if case.default_prompt is not None:
        found[".none"] = model.encode(some, prompt="")
    found[".cosines"] = cosines(model)
    return found


def cosines(model: Any) -> Any:
    """Cosines of the pairs, with the model's prompts for queries and documents."""
    from sentence_transformers.util import pairwise_cos_sim

    queries = model.encode_query([query for query, _ in PAIRS], convert_to_tensor=True)
    documents = model.encode_document([document for _, document in PAIRS], convert_to_tensor=True)
    return pairwise_cos_sim(queries, documents).numpy()


def scores(path: Path) -> Any:
    """Scores of the pairs by a classifier."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(path), device="cpu").predict(list(PAIRS))


def answers(folder: Path) -> dict[str, Any]:
    """Log-odds of ``yes`` by a Qwen3-Reranker, on the string of its model card. CrossEncoder.predict gives the same
    with a template that writes this string."""
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(write_reranker(folder / "modules", PAIR_TEMPLATE, has_modules=True)), device="cpu")
    pairs = list(PAIRS[: NUM_SHORT_PAIRS + 1])
    predicted = model.predict(pairs[:NUM_SHORT_PAIRS], activation_fn=torch.nn.Identity())
    transformer, score = model[0], model[1]
    found: dict[str, Any] = {}
    for index, instruction in enumerate(INSTRUCTIONS):
        logits = []
        for query, document in pairs:
            texts = list(card_prompt(query, document, *([instruction] if instruction else [])))
            before, question, after = transformer.tokenizer(texts, add_special_tokens=False)["input_ids"]
            room = MAX_ANSWER_TOKENS - len(before) - len(after)
            ids = torch.tensor([[*before, *question[:room], *after]])
            with torch.no_grad():
                features = {"causal_logits": transformer.model(input_ids=ids).logits}
                logits.append(float(score(features)["scores"]))
        found[f"answer.{index}"] = np.array(logits, np.float32)
    difference = float(np.abs(found["answer.0"][:NUM_SHORT_PAIRS] - predicted).max())
    assert difference < 1e-4, difference
    published = write_reranker(folder / "published", MESSAGES_TEMPLATE, has_modules=False)
    assert (published / "model.safetensors").read_bytes() == (folder / "modules" / "model.safetensors").read_bytes()
    return found


def main() -> None:
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case_name, case in EMBEDDERS.items():
            found = vectors(write_case(folder / case_name, case), case)
            golden |= {f"embed.{case_name}{suffix}": rows for suffix, rows in found.items()}
        for case_name, case in CLASSIFIERS.items():
            golden[f"score.{case_name}"] = scores(write_case(folder / f"classifier-{case_name}", case))
        golden |= answers(folder)
    for key, values in golden.items():
        print(key, values.shape, values if values.ndim == 1 else f"norm {np.linalg.norm(values[-1]):.4f}")
    rounded = {key: np.asarray(values, np.float32) for key, values in golden.items()}
    np.savez_compressed(OUT, **rounded)  # type: ignore[arg-type]  # the stub takes the names for its own flag
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
