"""Settings records with their engine, from flat names, and what a command makes of a file of `--config`."""

from dataclasses import MISSING, asdict, fields, replace

from outrider.cli.config_file import merge_config
from outrider.core.config import EngineConfig

ENGINE = {field.name for field in fields(EngineConfig)}


def with_engine(kind, **options):
    """Make a settings record. The options that are fields of `EngineConfig` are those of its engine."""
    field = next(each for each in fields(kind) if each.name == "engine")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    engine = replace(default, **{name: value for name, value in options.items() if name in ENGINE})
    return kind(engine=engine, **{name: value for name, value in options.items() if name not in ENGINE})


def configured(file, **given):
    """Return the configuration of a command with a file, and with these options on the command line."""
    return EngineConfig(**merge_config(asdict(EngineConfig()) | given, str(file), given=given.keys()))
