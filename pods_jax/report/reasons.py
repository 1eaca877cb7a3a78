"""Why a rollout was kept or dropped, in one sentence each."""

import math
from collections import Counter
from collections.abc import Sequence


def reasons(records: Sequence[dict], rule: str) -> list[str]:
    """Says of each rollout of one group why the rule kept or dropped it.

    Args:
        records: The group's rows of ``rollouts.jsonl``, in any order.
        rule: Entry of the ``RULES`` table; an unknown one (an own rule) gets the rank alone.

    Returns:
        One sentence a record, in the order of ``records``.
    """
    valid = [record for record in records if record["valid"]]
    tied = Counter(record["total"] for record in valid)
    explain = REASONS.get(rule, _explain_rank)(valid)

    def sentence(record: dict) -> str:
        if not record["valid"]:
            return "dropped: no score"
        shared = tied[record["total"]]
        rank = f"rank {record['rank']} of {len(valid)}" + (f" (shared by {shared})" if shared > 1 else "")
        return ", ".join(filter(None, (f"{'kept' if record['kept'] else 'dropped'}: {rank}", explain(record))))

    return [sentence(record) for record in records]


def _explain_rank(valid):
    return lambda record: ""


def _explain_all(valid):
    return lambda record: "every scored rollout is kept" if record["kept"] else ""


def _explain_random(valid):
    return lambda record: "drawn at random" if record["kept"] else "not drawn"


def _explain_percentile(valid):
    count = sum(record["kept"] for record in valid)
    return lambda record: f"one of {count} evenly spaced ranks" if record["kept"] else "between the sampled ranks"


def _explain_max_reward(valid):
    kept = [record["total"] for record in valid if record["kept"]]

    def explain(record):
        if record["kept"]:
            return _end(len(kept), "highest")
        return "equal to the last kept, not drawn" if record["total"] in kept else "below the kept"

    return explain


def _explain_max_variance(valid):
    kept = sorted((record["total"] for record in valid if record["kept"]), reverse=True)
    high = _highest_count(kept, sorted((record["total"] for record in valid), reverse=True))
    lowest_high = kept[high - 1] if high else math.inf

    def explain(record):
        if len(kept) == len(valid):
            return "all scored rollouts are needed"
        if len({other["total"] for other in valid}) == 1:
            return "all rewards are equal: no choice has variance"
        if record["kept"]:
            return _end(high, "highest") if record["total"] >= lowest_high else _end(len(kept) - high, "lowest")
        return "equal to kept ones, not drawn" if record["total"] in kept else "in the middle"

    return explain


def _end(count: int, end: str) -> str:
    return f"among the {count} {end}" if count > 1 else f"the {end}"


def _highest_count(kept: list[float], totals: list[float]) -> int:
    """How many kept rewards come from the top (both lists fall); where ties allow several counts, the widest gap decides."""
    m = len(kept)
    fits = [k for k in range(m + 1) if kept == totals[:k] + totals[len(totals) - (m - k) :]]
    gap = {k: kept[k - 1] - kept[k] if 0 < k < m else 0.0 for k in fits}
    return max(fits, key=lambda k: (gap[k], -abs(2 * k - m)), default=m)


REASONS = {
    "max_variance": _explain_max_variance,
    "random": _explain_random,
    "percentile": _explain_percentile,
    "max_reward": _explain_max_reward,
    "all": _explain_all,
}
