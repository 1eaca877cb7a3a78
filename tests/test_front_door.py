import pytest

import pods_jax


@pytest.mark.parametrize("name", pods_jax.__all__)
def test_every_public_name_is_where_the_package_says(name):
    assert getattr(pods_jax, name) is not None


def test_any_other_name_is_refused():
    with pytest.raises(AttributeError, match="'Learners'"):
        pods_jax.Learners  # noqa: B018
