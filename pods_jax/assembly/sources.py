"""Where a policy comes from: a model, adapters, or a run that went on from them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pods_jax.assembly.policy import Architecture, load_policy, make_lora
from pods_jax.config.command_line import from_yaml
from pods_jax.config.entries import Config
from pods_jax.config.fields import ConfigError
from pods_jax.config.sections import DataConfig, ModelConfig
from pods_jax.data.templates import TEMPLATE_FILE
from pods_jax.models.lora import LoraSpec, join, split_adapters
from pods_jax.run.checkpoint import Checkpoints


@dataclass(frozen=True)
class PolicySource:
    """Where a policy comes from: a model or adapters alone, or a run that went on from there.

    Attributes:
        model: The model, with its tokenizer; of a run, the one that it started from.
        data: Which problems are asked, and how they become prompts; of a run, with its chat template.
        run: Run folder whose newest checkpoint holds the trained parameters, or None.
        lora: Adapters that the run trains, or None.
    """

    model: ModelConfig
    data: DataConfig
    run: Path | None = None
    lora: LoraSpec | None = None


def find_policy(model: ModelConfig, data: DataConfig) -> PolicySource:
    """Tells a run folder (it holds ``config.yaml``, where a model's holds JSON) behind ``model.path`` from any other place.

    The policy of a run has the run's tokenizer and chat template, unless others are given.

    Raises:
        ConfigError: the run's configuration cannot be read, or it has no checkpoints.
    """
    folder = Path(model.path).expanduser()
    file = folder / "config.yaml"
    if not file.is_file() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return PolicySource(model, data)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"model.path={folder} is the folder of a run without checkpoints")
    run = from_yaml(Config, file.read_text(encoding="utf-8"), source=str(file))
    tokenizer = model.tokenizer or run.model.tokenizer
    model = replace(model, path=run.model.path, revision=run.model.revision, tokenizer=tokenizer)
    if data.chat_template is None and tokenizer == run.model.tokenizer:
        template = run.data.chat_template and str(folder / TEMPLATE_FILE)
        options = data.template_options or run.data.template_options
        data = replace(data, chat_template=template, template_options=options)
    return PolicySource(model, data, folder, make_lora(run.lora))


def load_any_policy(source: PolicySource, mesh: Mesh, *, layers: str = "auto") -> tuple[Architecture, Any]:
    """Reads a policy from wherever it is; prints which checkpoint of a run was taken.

    Raises:
        ConfigError: the run has no complete checkpoint, or as ``load_policy``.
    """
    if source.run is None:
        return load_policy(source.model, mesh, layers=layers)
    checkpoints = Checkpoints(source.run / "checkpoints")
    try:
        step = checkpoints.latest()
        if step is None:
            raise ConfigError(f"model.path={source.run} is the folder of a run without a complete checkpoint")
        print(f"checkpoint of step {step} of {source.run}")
        architecture, params = load_policy(source.model, mesh, layers=layers, lora=source.lora)
        base = split_adapters(params)[1]
        del params  # without adapters the model would take memory next to the parameters that take its place
        return architecture, join(checkpoints.restore_params(step, split_adapters(architecture.shapes)[0]), base)
    finally:
        checkpoints.close()
