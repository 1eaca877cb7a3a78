"""Which prompts each step asks: an endless, shuffled iterator whose position can be saved and sought.

The last stage of the data layer: the loop draws one list of prompts a step and pads it to a batch.
"""

from collections.abc import Sequence

import grain

from pods_jax.types import Prompt


def make_loader(prompts: Sequence[Prompt], *, prompts_per_step: int, seed: int) -> grain.DatasetIterator[list[Prompt]]:
    """Returns an endless iterator over lists of ``prompts_per_step`` training prompts, the same one on every process.

    Epochs follow each other in one stream, each in an order of its own, and step ``s`` takes the ``s``-th block of the stream.
    Hence every step is full, also across the end of an epoch, and the order does not depend on ``prompts_per_step``.

    The iterator's ``get_state()`` is a small dict of JSON values; ``set_state()`` seeks to it without replaying, and is valid
    for the same prompts, ``prompts_per_step`` and seed.

    Args:
        prompts: All training prompts.
        prompts_per_step: Prompts of one step over all processes.
        seed: Seed of the order, from 0 to 2**32 - 1.

    Raises:
        ValueError: There are fewer prompts than one step takes, or a step takes none.
    """
    if not 1 <= prompts_per_step <= len(prompts):
        raise ValueError(f"data.prompts_per_step={prompts_per_step} is impossible with {len(prompts)} training prompts")
    stream = grain.MapDataset.source(prompts).seed(seed).shuffle().repeat()
    # The stream has no end, so nothing is ever dropped; without the flag grain overflows on its length at batches of one.
    steps = stream.batch(prompts_per_step, drop_remainder=True, batch_fn=list)
    # Prompts are in memory already: reading threads would only cost start-up time and a buffer.
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
