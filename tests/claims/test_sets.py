import pytest

from wellcond.claims.sets import IMAGE_SETS, PHOTOGRAPHS, parse_data, smoke_data, with_generated


def test_every_set_is_read_as_as_many_tokens():
    for one in IMAGE_SETS.values():
        assert one.image_size % one.patch_size == 0
        tokens = {"digits": 16, "imagenette": 196}.get(one.name, 64)
        assert (one.image_size // one.patch_size) ** 2 == tokens


def test_imagenette_is_as_the_rules_have_it():
    one = IMAGE_SETS["imagenette"]
    assert (one.classes, one.train_samples, one.epochs, one.batch_size) == (10, 9_469, 50, 64)
    assert one.respectable == 0.75


def test_photographs_need_no_folder_and_stand_for_themselves():
    assert [one.set for one in with_generated([], ["photographs"])] == [PHOTOGRAPHS]
    assert [one.set.name for one in smoke_data(["cifar10", "photographs"])] == ["digits", "photographs"]
    assert PHOTOGRAPHS.name not in IMAGE_SETS  # nothing is trained on them


def test_a_path_is_read_as_what_it_holds(tmp_path):
    for name in ("shards", "python/cifar-10-batches-py", "plain/train"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shards" / "train-000.tar.gz").touch()
    for folder, kind in (("shards", "wds"), ("python", "cifar10"), ("plain", "folder")):
        given = parse_data([f"cifar10={tmp_path / folder}"])[0]
        assert (given.set.name, given.spec) == ("cifar10", f"{kind}:{tmp_path / folder}")
    assert parse_data(["cifar100=hf:cifar100"])[0].spec == "hf:cifar100"
    assert parse_data(["digits"])[0].spec == "digits"
    assert parse_data(["cifar10:somewhere"])[0].spec == "cifar10:somewhere"


@pytest.mark.parametrize("text", ["cifar11=data", "data", "cifar10", "cifar10="])
def test_what_does_not_say_which_set_lies_where_is_refused(text):
    with pytest.raises(ValueError, match="write NAME=PATH"):
        parse_data([text])


def test_a_set_is_given_once(tmp_path):
    with pytest.raises(ValueError, match="twice"):
        parse_data([f"cifar10={tmp_path}", f"cifar10={tmp_path}"])


def test_a_folder_that_is_not_there_is_said_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        parse_data([f"cifar10={tmp_path / 'nowhere'}"])
