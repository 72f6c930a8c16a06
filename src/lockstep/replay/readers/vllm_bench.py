"""What ``vllm bench serve --save-result --save-detailed`` writes, and our own ``bench serve`` after it.

One JSON document with aligned arrays: ``input_lens``, ``output_lens``, ``start_times`` (seconds of any clock) and,
if there, ``errors``. A request that failed was load all the same: lengths of 0 tokens count as 1. What else the file
holds are measurements; they are not read.
"""

from __future__ import annotations

from lockstep.errors import TraceError
from lockstep.replay.readers.document import Located, Members
from lockstep.replay.readers.fields import PS_PER_S, array, time_ps, whole
from lockstep.replay.workload import WorkloadRequest

ARRAYS = ("input_lens", "output_lens", "start_times")
RUN_KEYS = ("num_prompts", "request_rate", "completed", "total_input_tokens")
"""Of every result, detailed or not."""


def requests_of(document: Members, name: str) -> list[WorkloadRequest]:
    """The requests in the order in which they were sent; arrivals in picoseconds of the file's clock."""
    missing = [key for key in ARRAYS if key not in document]
    if missing:
        raise TraceError(
            f"{name}: {' and '.join(missing)} missing; a result holds single requests when it is saved with "
            "--save-detailed"
        )
    columns = [_column(key, document[key], name) for key in ARRAYS]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{key} {len(column)}" for key, column in zip(ARRAYS, columns, strict=True))
        raise TraceError(f"{name}: its arrays differ in length: {lengths}")
    requests = [
        _request(index, num_input, num_output, start_s, f"{name}:{document[ARRAYS[0]].line}: request {index}")
        for index, (num_input, num_output, start_s) in enumerate(zip(*columns, strict=True))
    ]
    return sorted(requests, key=lambda request: request.arrival)


def _column(key: str, located: Located, name: str) -> list[object]:
    return list(array(located.value, key, f"{name}:{located.line}"))


def _request(index: int, num_input: object, num_output: object, start_s: object, place: str) -> WorkloadRequest:
    most = max(1, whole(num_output, "its entry of output_lens", place))
    return WorkloadRequest(
        name=str(index),
        num_prompt_tokens=max(1, whole(num_input, "its entry of input_lens", place)),
        max_output_tokens=most,
        num_output_tokens=most,
        arrival=time_ps(start_s, "its entry of start_times", place, PS_PER_S),
        place=place,
    )
