"""Which prompts each step asks: an endless, shuffled, sharded iterator whose position can be saved and sought.

The data layer's last stage: the loop draws one list of prompts a step and pads it to a batch.
"""

from collections.abc import Sequence

import grain

from pods_jax.types import Prompt


def make_loader(
    prompts: Sequence[Prompt], *, prompts_per_step: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator[list[Prompt]]:
    """Build the endless iterator over training prompts.

    Epochs follow each other in one stream, each in an order of its own; step ``s`` takes the stream's ``s``-th block of
    ``prompts_per_step``, and every process its own equal part of that block. Hence every step is full, also across the end of
    an epoch; the processes partition each epoch; and the order does not depend on how many processes there are.

    The iterator's ``get_state()`` is a small dict of JSON values; ``set_state()`` seeks to it without replaying, and is valid
    for the same prompts, ``prompts_per_step`` and seed.

    Args:
        prompts: All training prompts, the same list on every process.
        prompts_per_step: Prompts of one step over all processes.
        seed: Seed of the order, from 0 to 2**32 - 1.
        process_index: This process.
        process_count: Number of processes, a divisor of ``prompts_per_step``.

    Returns:
        Iterator over lists of ``prompts_per_step / process_count`` prompts.

    Raises:
        ValueError: Fewer prompts than one step takes, a step that does not divide over the processes, or an impossible index.
    """
    _check(len(prompts), prompts_per_step, process_index, process_count)
    share = prompts_per_step // process_count
    first = process_index * share
    stream = grain.MapDataset.source(prompts).seed(seed).shuffle().repeat()
    # The stream has no end, so nothing is ever dropped; without the flag grain overflows on its length at batches of one.
    steps = stream.batch(prompts_per_step, drop_remainder=True, batch_fn=lambda block: list(block[first : first + share]))
    # Prompts are in memory already: reading threads would only cost start-up time and a buffer.
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _check(prompts: int, prompts_per_step: int, process_index: int, process_count: int) -> None:
    if prompts_per_step < 1 or prompts < prompts_per_step:
        raise ValueError(f"data.prompts_per_step={prompts_per_step} is impossible with {prompts} training prompts")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process {process_index} does not exist among {process_count}")
    if prompts_per_step % process_count:
        raise ValueError(f"data.prompts_per_step={prompts_per_step} does not divide over {process_count} processes")
