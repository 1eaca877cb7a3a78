"""Trains a policy with PODS: ``python -m pods_jax.train --help``.

Reads the configuration, builds the parts, runs the loop, and leaves a run folder: config.yaml, metrics.jsonl, rollouts.jsonl,
checkpoints/, tensorboard/, export/ (a Hugging Face folder) and report.html.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pods_jax.assembly.exporting import check_tokens, save_tokenizer
from pods_jax.assembly.forecast import memory_lines, program_lines
from pods_jax.assembly.inputs import find_inputs
from pods_jax.assembly.opening import await_all_hosts, join_hosts, load_model, open_run
from pods_jax.assembly.parts import check_sampler_sees, prompt_multiple
from pods_jax.assembly.policy import Architecture, find_base
from pods_jax.assembly.texts import Texts
from pods_jax.config.command_line import parse
from pods_jax.config.entries import Config, arithmetic
from pods_jax.config.fields import ConfigError
from pods_jax.devices.compiling import keep_compiled, use_32_bits, watch_compiling
from pods_jax.loop import Parts, train
from pods_jax.models.hf_weights import export_folder
from pods_jax.models.lora import merge
from pods_jax.models.peft_adapters import export_adapters
from pods_jax.report.page import write_report
from pods_jax.rollout.prompts import place_prompts
from pods_jax.run.log import read_metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    config = parse(Config, argv, prog="python -m pods_jax.train", description=(__doc__ or "").strip())
    try:
        run(config)
    except ConfigError as error:
        print(f"pods_jax.train: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(config: Config) -> Path:
    """Trains as configured; returns the run folder.

    Raises:
        ConfigError: the configuration names something that does not exist or cannot be; nothing has been written then.
    """
    use_32_bits()
    join_hosts(config)
    cache = keep_compiled(config.run.compile_cache)
    try:
        inputs = find_inputs(config)
        architecture, *params = load_model(config, inputs.mesh)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    await_all_hosts()

    # The run takes the only reference: a continued one frees these parameters before it reads its own.
    opening = open_run(config, inputs, architecture, params.pop())
    with inputs.scorer, jax.set_mesh(inputs.mesh), watch_compiling() as compiling, opening as opened:
        parts = opened.parts
        memory = memory_lines(config, architecture, inputs.mesh, parts.engine)
        for line in (*arithmetic(config), *memory, *_programs(config, parts, cache)):
            parts.log.say(line)
        if parts.frozen is not None:
            some = inputs.train_prompts[: config.data.prompts_per_step]
            batch = place_prompts(inputs.mesh, some, multiple=opened.settings.prompt_multiple)
            check_sampler_sees(parts.engine, opened.state.params, parts.frozen, batch, parts.sampling)
        if opened.done:
            parts.log.say(f"continuing from step {opened.done}")
        state = train(parts, opened.settings, opened.state, opened.done, opened.wall_seconds)
        parts.checkpoints.close()
        if config.run.export:
            _export(config, inputs.texts, architecture, parts.policy(state), inputs.folder)
        parts.log.say(f"compiled {compiling.programs:,} programs in {compiling.seconds:,.1f} s, or read them from the cache")
    if jax.process_index() == 0:
        _summary(config, inputs.folder)
    return inputs.folder


def _programs(config: Config, parts: Parts, cache: str | None) -> list[str]:
    """Lines on what is compiled, and where it is kept."""
    limit = config.data.max_prompt_length
    lines = program_lines(parts.engine, parts.learner, config=config, prompt_lengths=math.ceil(limit / prompt_multiple(limit)))
    return lines if cache is None else [*lines, f"compiled programs are kept in {cache}"]


def _export(config: Config, texts: Texts, architecture: Architecture, params: Any, folder: Path) -> None:
    """Writes the policy as a Hugging Face folder, and adapters as a PEFT folder beside it."""
    folders, dtype = texts.folders, config.model.param_dtype
    if architecture.lora is not None:
        base = find_base(config.model.path, config.model.revision)
        export_adapters(params, architecture.spec, architecture.lora, base, folder / "adapter", overwrite=True)
        params = jax.jit(partial(merge, scale=architecture.lora.scale))(params)
    export_folder(
        params,
        architecture.spec,
        folders.model,
        folder / "export",
        dtype=dtype,
        overwrite=True,
        tokenizer_folder=folders.tokenizer,
        generation_folder=folders.generation,
        files=texts.exported_files,
    )
    if jax.process_index() == 0:
        if architecture.lora is not None:
            save_tokenizer(texts, folder / "adapter")
        check_tokens(texts.exported_tokenizer(), folder / "export")


def _summary(config: Config, folder: Path) -> None:
    rows = [row for row in read_metrics(folder) if "eval/accuracy" in row]
    if rows:
        before, after = rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"]
        print(f"held-out accuracy: {before:.1%} before, {after:.1%} after {rows[-1]['step']} steps")
    if config.run.export:
        print(f"model:  {folder / 'export'}")
        if (folder / "adapter").is_dir():
            print(f"adapters: {folder / 'adapter'}")
    print(f"report: {write_report(folder)}")


if __name__ == "__main__":
    sys.exit(main())
