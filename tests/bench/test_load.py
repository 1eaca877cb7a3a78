"""The whole of loading in a fresh process: a peak is no timing, and needs no quiet machine."""

import pytest

from pods_jax.bench import load
from pods_jax.config.command_line import leaf_kinds
from pods_jax.config.fields import ConfigError
from pods_jax.models.families import read_spec
from pods_jax.models.hf_weights import load_params
from pods_jax.models.weight_table import array_shapes


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_loading_holds_the_parameters_and_little_else(dtypes, capsys, keys_read):
    options = load.LoadOptions(size_gb=0.25, files=3, file_dtype=dtypes[0], param_dtype=dtypes[1])
    read = keys_read()
    result = load.run(options)
    assert set(leaf_kinds(load.LoadOptions)) <= read
    assert result["file_bytes"] == pytest.approx(0.25e9, rel=0.1)
    assert result["parameter_bytes"] == pytest.approx(result["file_bytes"], rel=1e-3)
    assert result["files"] in (3, 4)
    assert 0.9 < result["ratio"] <= 1.3
    assert "(peak - before) / parameters" in capsys.readouterr().out


def test_the_checkpoint_is_a_model_of_the_asked_size(tmp_path):
    folder = load.write_checkpoint(tmp_path, load.LoadOptions(size_gb=0.006, files=2))
    params = load_params(folder, read_spec(folder), dtype="bfloat16")
    assert params["layers"]["down"].shape == array_shapes(read_spec(folder))[("layers", "down")]
    assert len(list(folder.glob("*.safetensors"))) in (2, 3)


def test_a_system_without_proc_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "STATUS", tmp_path / "status")
    with pytest.raises(ConfigError, match="Linux only"):
        load.run(load.LoadOptions())
