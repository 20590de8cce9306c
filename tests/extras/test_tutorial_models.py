"""The tutorial's scripts for other models and for images give the same losses and weights on one and
two ranks."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from scripts import TUTORIAL, assert_close, copy, definitions, numbers, run, start


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(name, ranks) runs a script, once, and also returns its folder."""

    @cache
    def run_once(name: str, ranks: int):
        if name == "hugging_face.py":
            pytest.importorskip("transformers")
        folder = tmp_path_factory.mktemp("models")
        return run(name, folder, ranks), folder

    return run_once


@pytest.mark.parametrize("name", ["hugging_face.py", "frozen_and_unused.py", "images.py"])
def test_two_ranks_give_the_losses_and_weights_of_one(outcome, name):
    (one, _), (two, _) = outcome(name, 1), outcome(name, 2)
    assert_close(two, one)
    losses = numbers(one.lines)[1::3]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]  # the model learns


def test_transformers_reads_the_model_and_computes_the_printed_loss(outcome):
    """The reference takes one sequence at a time, without padding, mask and labels."""
    transformers = pytest.importorskip("transformers")
    one, folder = outcome("hugging_face.py", 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    torch.manual_seed(0)
    make_sequences = definitions("hugging_face.py")["make_sequences"]
    _, test = make_sequences(480), make_sequences(90)
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(s[None]).logits[0, :-1], s[1:], reduction="none") for s in test
        ]
    assert numbers(one.lines)[-1] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)


def test_frozen_parameters_and_buffers_do_not_change(outcome, tmp_path):
    before = run("frozen_and_unused.py", tmp_path, replace=("range(3)", "range(0)")).state
    after = outcome("frozen_and_unused.py", 2)[0].state
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if name.startswith("encoder.")}


def test_without_the_flag_two_ranks_fail_and_the_error_names_it(tmp_path):
    flag = ", find_unused_parameters=True)", ")"
    done = start(copy(TUTORIAL / "frozen_and_unused.py", tmp_path, replace=flag), tmp_path, 2)
    assert done.returncode == 1 and "find_unused_parameters=True" in done.stderr
    assert not (tmp_path / "model.pt").exists()


def test_augmentation_depends_on_epoch_and_index_only():
    script = definitions("images.py")
    images, labels = script["make_images"](40)

    def augmented(images: torch.Tensor, epoch: int, order=range(40)) -> dict[int, bytes]:
        data = script["Augmented"](images, labels, epoch)
        assert data[0][0].shape == (1, 16, 16)
        return {i: data[i][0].numpy().tobytes() for i in order}

    first, other_epoch = augmented(images, 0), augmented(images, 1)
    assert augmented(images, 0, reversed(range(40))) == first
    assert sum(first[i] == other_epoch[i] for i in first) < 5  # one of 50 is the same by chance
    same_image = augmented(images[:1].expand(40, -1, -1, -1), 0)
    assert len({*same_image.values()}) > 10  # the index matters
