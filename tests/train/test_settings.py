"""Settings are changed by name, survive JSON, know which of them were given, and come in groups."""

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from wellcond.train.config import Config
from wellcond.train.settings import Settings, about, setting, title

Make = Callable[..., Config]


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("xyzzy=1", "there are"),
        ("epoch=3", "mean epochs"),
        ("batchsize=3", "mean batch_size"),
        ("lrr=1", "mean lr"),
        ("learning_rate=1", r"mean lr\?"),
        ("grad_clip=1", r"mean clip_grad\?"),
        ("device=cpu", "the option --device"),
        ("data_dir=x", "the option --data-dir"),
    ],
)
def test_an_unknown_setting_names_the_nearest(setting: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no setting.*({nearest})"):
        Config().changed([setting])


def test_a_setting_without_a_value_is_refused() -> None:
    for text in ("lr", "=3", ""):
        with pytest.raises(ValueError, match="name=value"):
            Config().changed([text])


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("lr=3e-4", "lr", 3e-4),
        ("epochs=7", "epochs", 7),
        ("batch-size=64", "batch_size", 64),
        ("compile=true", "compile", True),
        ("compile=no", "compile", False),
        ("compile_mode=default", "compile_mode", "default"),
        ("remove_skips=sa,mlp", "remove_skips", ("sa", "mlp")),
        ("remove_skips=", "remove_skips", ()),
        ("opt_betas=0.9,0.95", "opt_betas", (0.9, 0.95)),
        ("ema_decay=none", "ema_decay", None),
        ("ema_decay=0.99", "ema_decay", 0.99),
        ("model_kwargs=img_size=32,global_pool=avg", "model_kwargs", {"img_size": 32, "global_pool": "avg"}),
        ("model_kwargs={'depths': [1, 2]}", "model_kwargs", {"depths": [1, 2]}),
        ("gray=dct", "gray", "dct"),
        ("data=cifar10:a=b", "data", "cifar10:a=b"),
    ],
)
def test_text_becomes_the_type_of_its_field(setting: str, name: str, value: Any) -> None:
    found = getattr(Config().changed([setting]), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("epochs=1.5", "a whole number"),
        ("epochs=many", "a whole number"),
        ("lr=fast", "a number"),
        ("compile=maybe", "true or false"),
        ("model_kwargs=depth", "key=value"),
        ("opt_betas=a,b", "numbers"),
    ],
)
def test_text_of_another_type_is_refused(setting: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"{setting.partition('=')[0]} must be {word}"):
        Config().changed([setting])


def test_numbers_of_json_are_checked_too() -> None:
    for wrong in (1.5, True):
        with pytest.raises(ValueError, match="epochs must be a whole number"):
            Config().changed({"epochs": wrong})
    assert type(Config().changed({"lr": 1}).lr) is float


def test_json_gives_back_the_same_configuration(make_config: Make) -> None:
    config = make_config(remove_skips=["sa"], opt_betas=[0.9, 0.95], ema_decay=0.99, layer_scale=1.0, gray="svd")
    again = Config.from_json(json.loads(json.dumps(config.as_json())))
    assert again == config
    assert again.differences(config) == {}


def test_differences_are_named_with_both_values(make_config: Make) -> None:
    one, other = make_config(lr=1e-3), make_config(lr=2e-3, remove_skips=["mlp"])
    assert one.differences(other) == {"lr": (1e-3, 2e-3), "remove_skips": ([], ["mlp"])}


def test_what_was_given_is_known_and_is_no_part_of_the_values() -> None:
    config = Config(lr=1e-3, epochs=10)  # the defaults
    assert config.given == {"lr", "epochs"}
    assert config == Config()
    assert config.differences(Config()) == {}
    assert config.as_json() == Config().as_json()
    assert "given" not in config.as_json()
    more = config.changed(["batch-size=64"])
    assert more.given == {"lr", "epochs", "batch_size"}
    assert more.changed({"compile": True}, given=False).given == more.given
    assert more.as_defaults().given == frozenset()
    assert more.as_defaults() == more
    assert Config.from_json(more.as_json()).given == frozenset()
    assert dataclasses.replace(more, lr=2.0).given == frozenset()  # it cannot be told, and is not refused
    for again in (copy.deepcopy(more), pickle.loads(pickle.dumps(more))):
        assert again == more
        assert again.given == more.given


def test_a_group_is_added_by_its_class() -> None:
    """As the next task's will be: rules, its own problems, and an error where another task would ignore it."""

    @dataclass(frozen=True, kw_only=True)
    class Letters(Settings):
        """Sequences of letters"""

        tasks = ("mae",)

        length: int = setting(128, at_least=2)
        """How long."""
        sizes: tuple[int, ...] = (1, 2)

        @staticmethod
        def problems(config: Any, world: int) -> Any:
            if config.length % world:
                yield f"length={config.length} is no multiple of {world} processes"

    @dataclass(frozen=True, kw_only=True)
    class More(Config, Letters):
        pass

    config = More().changed({"task": "mae", "length": 9, "sizes": "3,4"})
    assert config.sizes == (3, 4)
    assert title(Letters) == "Sequences of letters"
    assert about(Letters) == {"length": "How long."}
    assert list(config.as_json())[-2:] == ["length", "sizes"]
    with pytest.raises(ValueError, match="length=9 is no multiple of 2"):
        config.changed({"model_kwargs": {"img_size": 224}}).check(world=2)
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        config.changed({"length": 1}).check()
    with pytest.raises(ValueError, match="length is a setting of task=mae, and the task is classify"):
        config.changed({"task": "classify"}).check()
