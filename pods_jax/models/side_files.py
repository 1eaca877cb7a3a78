"""What travels with exported weights: the tokenizer's files, whatever they are called, chat templates, and the licence."""

import shutil
from pathlib import Path

GENERATION = "generation_config.json"
# Weights in any format, their indices, configs of the source, and what training leaves next to a model.
_LEFT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".npz",
    ".npy",
    ".pkl",
    ".pickle",
    ".distcp",
    # Code of the model's own is never run.
    ".py",
}
_LEFT_NAMES = {"config.json", "adapter_config.json", "trainer_state.json", "README.md"}
_LEFT_ENDS = (".index.json",)
_TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*", "tekken.json", "*.tiktoken")
_TEMPLATES = ("chat_template*", "additional_chat_templates")


def holds_tokenizer(folder: Path) -> bool:
    """Returns whether a folder holds files of a tokenizer, or chat templates, which belong to one."""
    return any(next(folder.glob(pattern), None) is not None for pattern in (*_TOKENIZER, *_TEMPLATES))


def copy_side_files(model: Path, target: Path, *, tokenizer: Path | None = None, generation: Path | None = None) -> None:
    """Copies all that lies at the top of a model's folder and is no weight, index, config, code or model card.

    Hidden files stay behind; of folders, those of chat templates are copied.

    Args:
        model: Folder of the model, which also gives the licence.
        target: Existing folder to copy to.
        tokenizer: Folder whose files go instead of the model's, where the tokenizer is another's.
        generation: Folder whose ``generation_config.json`` goes instead of the model's.
    """
    for path in sorted((tokenizer or model).iterdir()):
        if path.is_dir() and path.match("*chat_templates"):
            shutil.copytree(path, target / path.name, copy_function=shutil.copyfile)
        elif path.is_file() and _travels(path.name):
            shutil.copyfile(path, target / path.name)
    for path in sorted(path for pattern in _TERMS for path in model.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    if ((generation or model) / GENERATION).is_file():
        shutil.copyfile((generation or model) / GENERATION, target / GENERATION)


def _travels(name: str) -> bool:
    left = name.startswith(".") or name == GENERATION or name in _LEFT_NAMES or name.endswith(_LEFT_ENDS)
    return not left and Path(name).suffix.lower() not in _LEFT_SUFFIXES
