"""The list of faults seen in other systems, one line each, and where in these tests each stands.

A test made with `fault("B01")`, or a table entry made with `fault_case("B01", ...)`, carries the number and the line
in its id, so `pytest -k B01` runs what guards against it. Where a fault and the contract of `verify` pull in
different directions (tokens tied at a filter's threshold, the order of the filters), the tests hold the contract.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

FAULTS = {
    # Acceptance and residual.
    "B01": "token without target mass accepted at a uniform of 0",
    "B02": "inclusive compare and a half-precision uniform accept impossible tokens",
    "B03": "equal rows and an impossible token divide 0 by 0",
    "B04": "NaN in a draft row slips past a guard for small mass",
    "B05": "residual loses small ratios to rounding",
    "B06": "draft drawn from a row of another precision than verified",
    "B07": "floor under the residual gives mass to impossible tokens",
    "B08": "softmax over the residual and a wrong count of matches",
    "B09": "probabilities looked up at the wrong ids",
    "B10": "rule for blocks that does not keep the joint law",
    "B11": "tempered on one side and raw on the other",
    "B12": "missing random numbers accept everything",
    # Invalid rows and ids.
    "B13": "padded lanes win where the last tile has no mass",
    "B14": "row of NaN emits the first id past the vocabulary",
    "B15": "row of NaN emits a plausible id and no error",
    "B16": "NaN in one sequence breaks its neighbours",
    "B17": "one-hot row with a huge top-k emits a wild id",
    "B18": "NaN replaced by 0 becomes the likeliest token",
    "B19": "huge weights overflow their sum and infinite ones crash",
    "B20": "two values mean no token",
    "B21": "NaN in a draft row surfaces far from its origin",
    # Random numbers.
    "B22": "noise of the draft used again by the verifier",
    "B23": "seed of a sequence ignored",
    "B24": "result depends on what was called before",
    "B25": "seeded and unseeded sequences disturb each other",
    "B26": "padding rows move the random numbers of others",
    "B27": "replays of a captured graph repeat their numbers",
    "B28": "new seed after capture has no effect",
    "B29": "generator read but not advanced",
    "B30": "coarse uniforms never reach the tail",
    "B31": "uniforms drawn in the dtype of the logits hit their end points",
    "B32": "uniform of 1 walks off the end of the distribution",
    "B33": "running sum that ends short of 1 emits an impossible token",
    "B34": "large vocabularies collapse the running sum",
    "B35": "noise of exactly 0 lets a masked token win",
    "B36": "noise at an end point is infinite",
    "B37": "seeds collide after a cast to float",
    "B38": "round verified again after a roll-back differs",
    "B39": "one number serves the acceptance and the recovered token",
    "B40": "raw words at the ends map outside the interval",
    # Which draft distribution.
    "B41": "draft filtered when drawn but raw when verified",
    "B42": "arg-max draft verified as if it had been sampled",
    "B43": "draft rows of sequences that were reordered",
    "B44": "certain drafts accepted only if the target draws the same",
    "B45": "residual subtracts the draft at one token only",
    "B46": "reduced draft vocabulary not added into target ids",
    "B47": "absent draft rows read as stale memory",
    "B48": "target scored without the parameters of its sequence",
    "B49": "ragged rows looked up by the wrong layout",
    "B50": "acceptance by equality while sampling",
    # Greedy and temperature.
    "B51": "greedy temperature divides beside sequences that sample",
    "B52": "masked logit divided by a greedy temperature",
    "B53": "greedy result is a rank and no id",
    "B54": "tiny temperature overflows half-precision logits",
    "B55": "two thresholds for what is greedy",
    "B56": "ties go to different ids on different paths",
    "B57": "greedy text differs from plain decoding by rounding in the model",
    "B58": "greedy target accepts what is not the arg-max",
    "B59": "greedy sequences consume random numbers",
    "B60": "sampling silently becomes greedy where a kernel is missing",
    # Filters.
    "B61": "top-p judged on the unfiltered row instead of on what top-k left",
    "B62": "ties at a threshold counted differently on two paths",
    "B63": "kept set depends on the batch size",
    "B64": "sampled token outside the reported set",
    "B65": "boundary token lost to rounding of the kept mass",
    "B66": "top-p of 1 drops tiny probabilities",
    "B67": "filter values at and beyond their ends",
    "B68": "approximate threshold search keeps the wrong set",
    "B69": "filter runs along the wrong axis",
    "B70": "filter writes into its input",
    "B71": "parameter ignored when speculating",
    "B72": "accepted tokens handed back out of order and parameters not expanded",
    # Ragged batches and counts.
    "B73": "sequences with different rejections overwrite each other",
    "B74": "batches and empty drafts crash",
    "B75": "acceptances behind a rejection are counted",
    "B76": "padding is judged and counted",
    "B77": "bonus token 0 taken for a match",
    "B78": "placeholder token indexes the last column",
    "B79": "no draft encoded as draft tokens 0",
    "B80": "padding behind the end printed as text",
    "B81": "rejection at the last draft takes the next row",
    "B82": "values a token given where values a sequence belong",
    "B83": "empty batch launches an empty grid",
    "B84": "grid too large for its axis does nothing",
    "B85": "odd vocabularies break vector loads",
    "B86": "option of one sequence changes the shapes of all",
    # Index width, dtypes, strides.
    "B87": "row offsets overflow 32 bits",
    "B88": "row stride taken to be the vocabulary",
    "B89": "strided output copied and lost",
    "B90": "parameters rounded to the dtype of the logits",
    "B91": "bits of one dtype read as another",
    "B92": "half-precision logits summed in half precision",
    # Vocabulary.
    "B93": "draft and target vocabularies differ unnoticed",
    "B94": "padded columns of the output layer are sampled",
    "B95": "grammar mask absent from the rows that are verified",
    "B96": "candidates taken to be sorted",
    "B97": "no-token value fed to the next step",
    # Loops round the verifier.
    "B98": "text goes on behind an accepted end of sequence",
    "B99": "more tokens than were asked for",
    "B100": "positions of the draft model gone stale",
    "B101": "processors of the draft differ from those assumed",
    "B102": "rejected tokens stay in a cache",
    "B103": "log-probabilities of 0 for every token",
    "B104": "history handed to a processor is stale",
    "B105": "prefix cache slots taken to be contiguous",
    "B106": "acceptance rate of 0 or 1 goes unnoticed",
    "B107": "formula in the documentation is wrong",
    # Several processes.
    "B108": "unseeded processes accept different counts",
    "B109": "processes differ on equal inputs",
    "B110": "random state depends on the rank",
    "B111": "ranks that hold parts of a vocabulary decide apart",
    "B112": "shape of the result depends on the path taken",
    # Graphs and compilers.
    "B113": "operator differs when compiled or claims to mutate its inputs",
    "B114": "host waits for the device in every step",
    "B115": "lengths frozen into a captured graph",
    "B116": "torch's random state inside a captured graph",
    # Speed and memory.
    "B117": "one tile holds the whole vocabulary",
    "B118": "kernel compiled again in the middle of serving",
    "B119": "kernel not specialised where that pays",
    "B120": "temporaries the size of batch times vocabulary",
    "B121": "row read dozens of times by a filter",
    "B122": "many tiny launches a step",
    "B123": "Python loop over the sequences",
    # Build and import.
    "B124": "launch that does nothing leaves the result unwritten",
    "B125": "import fails without a GPU",
    "B126": "first compiles of several processes mix their files",
    "B127": "extension built for another torch fails without a word",
    "B128": "kernel runs on another device than its tensors",
    "B129": "capability reported without the function behind it",
    "B130": "results change their number of fields",
    "B131": "NaN compares differently on different paths",
    "B132": "masked lanes of a load are not 0",
    "B133": "scan primitives give wrong prefixes",
    "B134": "wide integer constants break in some compilers",
}
"""What went wrong elsewhere, by number."""

NOT_SHOWN_HERE = {
    "B57": "rounding in a model's matrix products, before any logits reach verify",
    "B100": "needs two tokenizers; nothing here turns tokens of one into the other's",
    "B105": "how a server lays out its cache is outside the verify step",
    "B110": "needs several GPUs; the stateless generator is tested under B109",
    "B111": "needs ranks that each hold a part of the vocabulary; rows are always whole here",
    "B118": "compiled variants exist on a GPU only; the interpreter compiles nothing",
    "B119": "a speed of compiled kernels; the benchmarks measure it on a GPU",
    "B121": "a share of a GPU's bandwidth; the benchmarks measure it",
    "B126": "needs compiled kernels; the interpreter has no cache of compiled files",
}
"""Why a fault has no test, by number."""

Test = TypeVar("Test", bound=Callable[..., None])


def fault(*numbers: str) -> Callable[[Test], Test]:
    """Mark a test as guarding against faults of the list."""
    name = "-".join(map(fault_id, numbers))
    marks = pytest.mark.parametrize("fault", [numbers], ids=[name]), pytest.mark.usefixtures("fault")

    def mark(test: Test) -> Test:
        for each in marks:
            test = each(test)
        return test

    return mark


def fault_case(number: str, value: Any, note: str = "") -> ParameterSet:
    """Return a table entry whose id starts with a fault of the list."""
    return pytest.param(value, id=fault_id(number) + (f"-{_slug(note)}" if note else ""))


def fault_id(number: str) -> str:
    """Return the number and the line of a fault as a test id."""
    return f"{number}-{_slug(FAULTS[number])}"


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+]+", "-", text)
