"""`decodekit schema` writes the schema of a request."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from .conftest import Decodekit

STAGE = '''
from pydantic import Field

from decodekit import Kind, Stage, StageParams


class Louder(Stage):
    """Multiplies."""

    name = "louder"
    kind = Kind.SHAPE

    class Params(StageParams):
        by: float = Field(default=2.0, gt=0)

    def transform(self, logits, rows):
        logits *= rows.column("by")[:, None]
'''


def test_it_writes_a_valid_schema(decodekit: Decodekit) -> None:
    schema = json.loads(decodekit("schema", "--no-plugin-autoload").stdout)

    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"temperature": 0.5, "chain": [{"stage": "top_k", "k": 5}]})
    assert not validator.is_valid({"temperature": -1})


def test_a_plugin_of_a_file_is_in_it(decodekit: Decodekit, tmp_path: Path) -> None:
    path = tmp_path / "louder_stage.py"
    path.write_text(STAGE)
    out = tmp_path / "schema.json"

    result = decodekit("schema", "-p", str(path), "-o", str(out), "--compact")

    assert result.exit_code == 0
    assert result.stdout == ""
    schema = json.loads(out.read_text())
    assert schema["$defs"]["stage.louder"]["properties"]["by"]["exclusiveMinimum"] == 0
    assert out.read_text().count("\n") == 1


def test_one_stage_alone_by_its_alias(decodekit: Decodekit) -> None:
    schema = json.loads(decodekit("schema", "--stage", "tfs").stdout)

    Draft202012Validator.check_schema(schema)
    assert schema["title"] == "tail_free"
    assert schema["x-decodekit"]["kind"] == "CUT"
    unknown = decodekit("schema", "--stage", "tfz")
    assert unknown.exit_code == 2
    assert "unknown stage 'tfz'" in unknown.stderr
