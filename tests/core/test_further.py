"""A further model reads what is new, however its readers jump, and keeps no block too many."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decodekit import LLM
from decodekit.core.further import FurtherModel
from decodekit.plugins.author.table_model import write_table_model

SIZE = 31


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-64, 65, (SIZE, SIZE), generator=generator) / 16).float()


@pytest.fixture(scope="module")
def further(table: Tensor, tmp_path_factory: pytest.TempPathFactory) -> FurtherModel:
    folder: Path = write_table_model(tmp_path_factory.mktemp("further"), table)
    config = {"method": "draft_model", "model": str(folder)}
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        speculative_config=config,
        max_num_seqs=4,
        max_num_batched_tokens=7,
        max_model_len=64,
        block_size=4,
    )
    return llm.llm_engine.parts.further[0]


def test_logits_are_those_after_the_last_token(further: FurtherModel, table: Tensor) -> None:
    dice = random.Random(1)
    memories = [further.open() for _ in range(3)]
    texts = [[dice.randint(0, SIZE - 1)] for _ in memories]
    for _ in range(40):
        for text in texts:
            del text[max(len(text) - dice.randint(0, 4), 1) :]
            text += [dice.randint(0, SIZE - 1) for _ in range(dice.randint(0, 9))][: 60 - len(text)]

        places, logits = further.read(list(zip(memories, texts, strict=True)))

        assert places == [0, 1, 2]
        assert torch.equal(logits.argmax(1), table[[text[-1] for text in texts]].argmax(1))
        assert [memory.tokens for memory in memories] == texts
        assert further.pool.num_used == sum(-(-len(text) // 4) for text in texts)
    for memory in memories:
        further.close(memory)
    assert further.pool.num_used == 0


def test_a_reader_without_room_is_left_out(further: FurtherModel) -> None:
    memories = [further.open() for _ in range(2)]
    taken = further.pool.allocate(further.pool.num_free - 3)
    assert taken is not None

    places, logits = further.read([(memories[0], [1] * 10), (memories[1], [2] * 10)])

    assert (places, logits.shape[0]) == ([0], 1)
    further.pool.free(taken)
    for memory in memories:
        further.close(memory)
