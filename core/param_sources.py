"""Where the values of SamplingParams may come from besides the request: presets, other systems.

A mixin, so that `params.py` holds the fields alone. A value that the request did not give itself
has its layer in `_sources`, which a plan's provenance shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .presets import Preset

LAYERED: dict[str, Any] = {"_sources": {}, "_preset": None, "_notes": (), "_idle_cuts": ()}


class FromElsewhere:
    """Constructors from presets and from other systems' settings, and the layers of the values."""

    _fields_set: set[str]
    _sources: dict[str, str]  # field -> the layer that gave it, where that is not the request
    _preset: Preset | None  # the one whose fields were taken
    _notes: tuple[str, ...]  # what a value meant elsewhere, and here
    _idle_cuts: tuple[str, ...]  # cuts that were given with temperature 0, which resets them

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        preset_file: str | os.PathLike[str] | None = None,
        **override: Any,
    ) -> Self:
        """Make parameters from the preset `name` with some fields changed.

        `SamplingParams.from_preset("chat", max_tokens=200)`. `preset_file` adds presets to the
        shipped ones. ValidationError for an unknown preset, and for a pinned field with another
        value.
        """
        from .presets import Presets, merged

        preset = Presets.load(preset_file).find(name)
        params = cls(**{**merged(preset, override), "preset": name})
        params.note_layer([field for field in preset.fields if field not in override], preset.layer)
        params.__dict__["_preset"] = preset
        params._fields_set.discard("preset")
        return params

    @classmethod
    def from_generate(cls, config: Any = None, /, **kwargs: Any) -> Self:
        """Make parameters that decode as transformers' `generate(**kwargs)` does.

        `config` is a GenerationConfig or a dict of one; keywords win over it. What generate itself
        assumes counts: greedy unless `do_sample`, `top_k` 50, 20 tokens. ValidationError names a
        key that has no counterpart and says what to do instead. `porting_notes` has the rest.
        """
        from .dialects import from_generate

        fields, notes = from_generate(config, kwargs)
        return cls._ported(fields, notes)

    @classmethod
    def from_dialect(
        cls, dialect: str, settings: Mapping[str, Any], *, defaults: bool = False
    ) -> Self:
        """Make parameters from another system's settings, by its names and off-values.

        `SamplingParams.from_dialect("llama.cpp", {"temperature": 0.8, "repeat_penalty": 1.1})` also
        chooses the profile of that system, if there is one. With `defaults` settings that are not
        given take the values that the system documents. ValidationError names a key that has no
        counterpart and says what to do instead. `porting_notes` tells what differs in meaning.
        """
        from .dialects import from_dialect

        fields, notes = from_dialect(dialect, settings, defaults=defaults)
        return cls._ported(fields, notes)

    @classmethod
    def _ported(cls, fields: Mapping[str, Any], notes: Iterable[str]) -> Self:
        params = cls(**fields)
        params.__dict__["_notes"] = tuple(notes)
        return params

    # --- layers -----------------------------------------------------------------------------------

    @property
    def own_fields(self) -> frozenset[str]:
        """The fields that the request set itself, unlike those of a preset or of the model."""
        return frozenset(self._fields_set.difference(self._sources))

    @property
    def sources(self) -> Mapping[str, str]:
        """Field -> the layer that gave it ("preset chat"), for fields not set by the request."""
        return dict(self._sources)

    @property
    def applied_preset(self) -> Preset | None:
        """The preset whose fields were taken; None while `preset` is a mere name."""
        return self._preset

    @property
    def presets(self) -> tuple[str, ...]:
        """The name of the preset that was taken and of those that it extends, nearest first."""
        return () if self._preset is None else self._preset.lineage

    @property
    def porting_notes(self) -> tuple[str, ...]:
        """What `from_generate` or `from_dialect` had to say; empty for other parameters."""
        return self._notes

    def note_layer(self, names: Iterable[str], layer: str) -> None:
        """Say that the values of these fields came from `layer` and not from the request."""
        self._sources.update(dict.fromkeys(names, layer))

    def take_layer(
        self, fields: Mapping[str, Any], layer: str, *, preset: Preset | None = None
    ) -> None:
        """Set `fields`, all checked, as given by `layer`; `preset` is noted as the one applied."""
        self.__dict__.update(fields)
        self._fields_set.update(fields)
        self.note_layer(fields, layer)
        if preset is not None:
            self.__dict__["_preset"] = preset
        self._settle(fields)

    def _settle(self, names: Iterable[str]) -> None:
        raise NotImplementedError

    def _before_assignment(self, name: str, value: Any, defaults: Mapping[str, Any]) -> None:
        """Refuse a pinned field; a new preset takes back what the former one gave."""
        if self._preset is not None and name != "preset":
            from .presets import refuse_pinned

            refuse_pinned(self._preset, name, value)
        if name == "preset":
            from .presets import LAYER
            from .request_params import fresh

            for field, layer in list(self._sources.items()):
                if layer.startswith(LAYER):
                    self.__dict__[field] = fresh(defaults[field])
                    self._fields_set.discard(field)
                    del self._sources[field]
            self.__dict__["_preset"] = None
        self._sources.pop(name, None)
