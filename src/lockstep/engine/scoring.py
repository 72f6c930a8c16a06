"""Scores of pairs of texts: how relevant a document is to a query, by each kind of model.

- A classifier reads both texts as one, and its head gives the score.
- A model of text answers whether the document meets the query: the score is the probability of ``yes`` against ``no``,
  as in the model card of Qwen3-Reranker.
- An embedding model gives a vector of each text, and the score is their cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from lockstep.artifacts.task import Task
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.row_math import row_math

Scoring = Literal["classifier", "answer", "cosine"]
YES, NO = "yes", "no"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Default instruction to a model of text, from the model card of Qwen3-Reranker."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    f'Note that the answer can only be "{YES}" or "{NO}".'
)


def scoring_of(task: Task, num_stages: int) -> Scoring | None:
    """Return how a model scores pairs of texts; None: it generates text."""
    if task == "generate":
        return None
    return "cosine" if task == "embed" else "classifier" if num_stages > 1 else "answer"


def no_scores(name: str) -> InvalidParameterError:
    """The error for a model that gives no scores."""
    return InvalidParameterError(
        f"model {name!r} generates text; a score needs a reranker or an embedding model (or, if it was trained as a "
        "reranker, the task 'rerank' in the manifest or by --task)",
        param="model",
    )


def score_requests(
    name: str,
    scoring: Scoring | None,
    query: str,
    documents: Sequence[str],
    instruction: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> list[tuple[str, GenerationRequest]]:
    """Requests whose vectors `scores_of` takes, each with the name of its text: of an embedding model, the query and
    each document; otherwise each pair.

    Args:
        name: name of the model, for errors.
        scoring: how it scores pairs.

    Raises:
        InvalidParameterError: the model gives no scores or takes no instruction, a text is blank, or the documents are
            one text.
    """
    if scoring is None:
        raise no_scores(name)
    if isinstance(documents, str):
        raise InvalidParameterError("documents is one text; it must be a list of texts", param="documents")
    named = [(f"documents[{index}]", document) for index, document in enumerate(documents)]
    for where, text in (("query", query), *named):
        check_not_blank(text, where)
    first = GenerationRequest(query, instruction=instruction, truncate_prompt_tokens=truncate_prompt_tokens)
    if scoring != "cosine":
        return [(where, replace(first, document=document)) for where, document in named]
    if instruction is not None:
        raise no_instruction(name)
    first = replace(first, pooling="model", text_role="query")
    others = [(where, replace(first, prompt=document, text_role="document")) for where, document in named]
    return [("query", first), *others]


def scores_of(scoring: Scoring | None, vectors: Sequence[npt.NDArray[np.float32]]) -> list[float]:
    """Scores of the documents, by the vectors of their `score_requests`."""
    if scoring == "cosine":
        query, *documents = vectors
        return [cosine(query, document) for document in documents]
    assert scoring is not None, "the requests were made for a model that gives scores"
    return [pair_score(scoring, vector) for vector in vectors]


def check_not_blank(text: str, name: str) -> None:
    """InvalidParameterError, with the text's name, if a text to score is empty or has only spaces."""
    if not text.strip():
        raise InvalidParameterError(f"{name}: the text is {'blank' if text else 'empty'}", param=name)


def no_instruction(name: str) -> InvalidParameterError:
    """The error for an instruction to a model that reads none."""
    return InvalidParameterError(f"model {name!r} takes no instruction", param="instruction")


def check_task(request: GenerationRequest, name: str, task: Task) -> None:
    """Check that a model is for requests of this kind. A model that generates text gives embeddings, too.

    Raises:
        InvalidParameterError: the request asks for text and the model gives none, or it asks a reranker, which scores
            pairs of texts, for an embedding of one.
    """
    if not request.gives_vector and task != "generate":
        raise InvalidParameterError(
            f"model {name!r} has the task {task!r} and generates no text; choose a model for text", param="model"
        )
    if task == "rerank" and request.document is None and request.pooling not in (None, "score"):
        raise InvalidParameterError(
            f"model {name!r} is a reranker, which scores pairs of texts and gives no embeddings; choose an embedding "
            "model",
            param="model",
        )


def pair_request(
    call: GenerationRequest, name: str, scoring: Scoring | None, tokenizer: Tokenizer
) -> GenerationRequest:
    """Convert a request for a score to the form in which its model computes it. Other requests are not changed.

    Raises:
        InvalidParameterError: the model gives no scores, takes no instruction, or has no single tokens for its answers.
    """
    if call.document is None:
        if call.max_document_tokens is None or not isinstance(call.prompt, str):
            return call
        return replace(
            call, prompt=tokenizer.first_part(call.prompt, call.max_document_tokens), max_document_tokens=None
        )
    if not isinstance(call.prompt, str):
        raise InvalidParameterError("the query of a score must be text", param="query")
    if scoring in (None, "cosine"):  # the cosine of two vectors is two requests
        raise no_scores(name)
    query, document = call.prompt, call.document
    if call.max_document_tokens is not None:
        document = tokenizer.first_part(document, call.max_document_tokens)
        call = replace(call, document=document, max_document_tokens=None)
    if scoring == "classifier":
        if call.instruction is not None:
            raise no_instruction(name)
        return replace(call, pooling="score")
    messages = _pair_messages(query, document, call.instruction, tokenizer)
    conversation = Conversation(messages, {"enable_thinking": False}, reasoning="off")
    answers = tokenizer.parts.answer_ids or tuple(_only_token(tokenizer, word) for word in (YES, NO))
    return replace(call, prompt=conversation, document=None, instruction=None, logit_ids=answers)


def _pair_messages(
    query: str, document: str, instruction: str | None, tokenizer: Tokenizer
) -> tuple[dict[str, str], ...]:
    """Conversation that asks whether a document meets a query. The document's text is the end of the last message.

    A template with roles for both writes its own question, with the instruction as the message of the system.
    """
    if tokenizer.takes_pairs:
        asked = tokenizer.prompt_text(None) if instruction is None else instruction
        first = ({"role": "system", "content": asked},) if asked else ()
        return (*first, {"role": "query", "content": query}, {"role": "document", "content": document})
    asked = INSTRUCTION if instruction is None else instruction
    question = f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
    return ({"role": "system", "content": _SYSTEM}, {"role": "user", "content": question})


def pair_score(scoring: Scoring, vector: npt.NDArray[np.float32]) -> float:
    """Score between 0 and 1 from the vector of a `pair_request`: a classifier's value, or two logits.

    Raises:
        InvalidParameterError: the classifier has several labels, so that no one value is the score.
    """
    if scoring == "answer":
        value = float(vector[0]) - float(vector[1])
    elif len(vector) == 1:
        value = float(vector[0])
    else:
        raise InvalidParameterError(
            f"this model's classifier has {len(vector)} labels, and a score needs exactly one", param="model"
        )
    power = float(row_math().weigh(np.array([-abs(value)], np.float32), 0.0, 1.0)[0])
    return (1.0 if value >= 0 else power) / (1.0 + power)


def cosine(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Cosine of the angle between two vectors, the same on every processor; 0 if one is zero."""
    first, second = row_math().unit(np.stack([one, other]))
    return row_math().total(first.astype(np.float64) * second)


def cut(vectors: npt.NDArray[np.float32], dimensions: int | None, normalize: bool) -> npt.NDArray[np.float32]:
    """Keep the first dimensions of vectors [n, size], and divide each by its length.

    Raises:
        InvalidParameterError: the vectors have fewer dimensions.
    """
    if dimensions is not None and not 1 <= dimensions <= vectors.shape[1]:
        raise InvalidParameterError(
            f"dimensions is {dimensions}; this model's vectors have {vectors.shape[1]}", param="dimensions"
        )
    vectors = vectors[:, :dimensions]
    return row_math().unit(vectors) if normalize else vectors


def _only_token(tokenizer: Tokenizer, word: str) -> int:
    [ids] = tokenizer.encode_plain([word])
    if len(ids) != 1:
        raise InvalidParameterError(
            f"this model has no single token for {word!r}, so it gives no scores", param="model"
        )
    return ids[0]
