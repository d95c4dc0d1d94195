"""Settings from file and environment: strict, named mistakes, no secret ever shown."""

from __future__ import annotations

import pprint
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from processor.config import KafkaSettings, Settings, load_settings
from processor.errors import ConfigError, ConfigErrors

PASSWORD = "s3cr3t"


def load(tmp_path: Path, content: Any = None, **environ: str) -> Settings:
    file = tmp_path / "settings.yaml"
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    file.write_text("" if content is None else text, encoding="utf-8")
    return load_settings(file, {f"PROCESSOR_{name}": value for name, value in environ.items()})


def lines_of(tmp_path: Path, content: Any = None, **environ: str) -> list[str]:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        load(tmp_path, content, **environ)
    assert PASSWORD not in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "laptop")
    settings = load_settings(None, {"XDG_CACHE_HOME": "/cache", "PATH": "/bin"})
    assert settings.model_dump(mode="json") == {
        "policies": [],
        "model": {
            "source": "smollm2",
            "revision": None,
            "dtype": "auto",
            "device": "auto",
            "cache_dir": "/cache/processor",
            "threads": 0,
            "kernels": "auto",
            "snapshots": True,
        },
        "batch": {"max_rows": 2048, "max_events": 32},
        "kafka": {
            "bootstrap_servers": "localhost:9092",
            "group": "processor",
            "replica": "0",
            "transactional_id_prefix": "processor",
            "group_protocol": "classic",
            "static_membership": None,
            "session_timeout_ms": 12000,
            "max_poll_interval_ms": 300000,
            "transaction_timeout_ms": 30000,
            "retry_backoff_ms": 5,
            "publish_timeout_ms": 10000,
            "first_start": "earliest",
            "auto_offset_reset": "error",
            "client": {},
        },
        "runtime": {
            "hang_s": 60.0,
            "score_timeout_s": 300.0,
            "stall_s": 120.0,
            "max_rejections_in_row": 1000,
            "drain_s": 20.0,
            "reload_s": 0.0,
        },
    }


@pytest.mark.parametrize("content", [None, "# nothing", {}, {"kafka": None, "policies": None}])
def test_empty_files_and_sections_mean_the_defaults(tmp_path: Path, content: Any) -> None:
    assert load(tmp_path, content) == load_settings(None, {})


def test_the_environment_wins(tmp_path: Path) -> None:
    content = {"kafka": {"group": "file", "retry_backoff_ms": 7}, "batch": {"max_rows": 1}}
    kafka = load(tmp_path, content, KAFKA__GROUP="env").kafka
    assert (kafka.group, kafka.retry_backoff_ms) == ("env", 7)
    assert load(tmp_path, content, BATCH__MAX_ROWS="64").batch.max_rows == 64


VARIABLES: list[tuple[str, str, Any]] = [
    ("MODEL__THREADS", "2", 2),
    ("MODEL__SOURCE", "12", "12"),
    ("MODEL__REVISION", "true", "true"),
    ("KAFKA__BOOTSTRAP_SERVERS", "a:1,b:2", "a:1,b:2"),
    ("KAFKA__REPLICA", "07", "07"),
    ("KAFKA__STATIC_MEMBERSHIP", "false", False),
    ("KAFKA__STATIC_MEMBERSHIP", "False", False),
    ("KAFKA__CLIENT", '{"security.protocol": "SSL"}', {"security.protocol": "SSL"}),
    ("RUNTIME__DRAIN_S", "5", 5.0),
    ("RUNTIME__DRAIN_S", "2.5", 2.5),
]


@pytest.mark.parametrize(("name", "text", "value"), VARIABLES)
def test_variables_have_the_type_of_their_setting(
    tmp_path: Path, name: str, text: str, value: Any
) -> None:
    section, key = name.lower().split("__")
    environ = {name: text} | ({"MODEL__SOURCE": "org/name"} if key == "revision" else {})
    assert getattr(getattr(load(tmp_path, **environ), section), key) == value


def test_each_client_property_has_a_variable(tmp_path: Path) -> None:
    content = {"kafka": {"client": {"sasl.username": "file", "security.protocol": "SASL_SSL"}}}
    kafka = load(
        tmp_path, content, KAFKA__CLIENT__SASL_USERNAME="env", KAFKA__CLIENT__SASL_PASSWORD="12"
    ).kafka
    assert kafka.client == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "env",
        "sasl.password": "12",
    }


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    content = {
        "policies": ["policies/a", "/policies/b"],
        "model": {"source": "models/m.gguf", "cache_dir": "cache"},
    }
    settings = load(tmp_path, content)
    assert settings.policies == (tmp_path / "policies/a", Path("/policies/b"))
    assert settings.model.source == str(tmp_path / "models/m.gguf")
    assert settings.model.cache_dir == tmp_path / "cache"
    assert load(tmp_path, {"model": {"source": "org/name"}}).model.source == "org/name"
    assert load(tmp_path, {"model": {"source": "./m"}}).model.source == str(tmp_path / "m")


@pytest.mark.parametrize("text", ["a, /b", '["a", "/b"]'])
def test_policies_of_a_variable(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, POLICIES=text).policies == (tmp_path / "a", Path("/b"))


MISTAKES: list[tuple[Any, str]] = [
    ([1], "settings.yaml: settings = [1]: must be a mapping of sections"),
    ("a: [", "settings.yaml: settings = "),
    ("kafka: {}\nkafka: {}", "not YAML: key 'kafka' stands twice"),
    ({"kafak": {}}, "settings.yaml: kafak = {}: unknown key: remove it or correct its name"),
    ({"kafak": None}, "settings.yaml: kafak = None: unknown key"),
    ({"kafka": {"gruop": "x"}}, "settings.yaml: kafka.gruop = 'x': unknown key"),
    ({"kafka": []}, "kafka = []: Input should be an object"),
    ({"kafka": {"group": 5}}, "kafka.group = 5: YAML does not read this as a text: put it in quot"),
    ({"kafka": {"group": "a b"}}, "kafka.group = 'a b': String should match pattern"),
    ({"kafka": {"replica": ""}}, "kafka.replica = '': String should match pattern"),
    ({"kafka": {"bootstrap_servers": ""}}, "kafka.bootstrap_servers = '': String should match"),
    ({"kafka": {"static_membership": 1}}, "kafka.static_membership = 1: Input should be a valid b"),
    ({"kafka": {"auto_offset_reset": "none"}}, "kafka.auto_offset_reset = 'none': Input should"),
    ({"kafka": {"retry_backoff_ms": 0}}, "kafka.retry_backoff_ms = 0: Input should be greater"),
    ({"batch": {"max_rows": "64"}}, "batch.max_rows = '64': Input should be a valid integer"),
    ({"batch": {"max_rows": True}}, "batch.max_rows = True: Input should be a valid integer"),
    ({"batch": {"max_events": 1.5}}, "batch.max_events = 1.5: Input should be a valid integer"),
    ({"model": {"dtype": "fp32"}}, "model.dtype = 'fp32': Input should be 'auto', 'float32', "),
    ({"model": {"threads": -1}}, "model.threads = -1: Input should be greater than or equal to 0"),
    ({"model": {"revision": "main"}}, "model.revision = 'main': only a hub id has one: remove it"),
    ({"runtime": {"drain_s": float("nan")}}, "runtime.drain_s = nan: Input should be"),
    ({"policies": "a"}, "policies = 'a': Input should be a valid array"),
    (
        {"kafka": {"transaction_timeout_ms": 19_999}},
        "kafka.transaction_timeout_ms = 19999: raise it to 20000, twice publish_timeout_ms, or lo",
    ),
    (
        {"kafka": {"transaction_timeout_ms": 900_001}},
        "kafka.transaction_timeout_ms = 900001: lower it to 900000: brokers refuse more",
    ),
    (
        {"kafka": {"max_poll_interval_ms": 40_000}},
        "kafka.max_poll_interval_ms = 40000: raise it above 40000, 4 publish_timeout_ms",
    ),
    (
        {"runtime": {"hang_s": 40.0}},
        "runtime.hang_s = 40.0: raise it above 40, 4 times kafka.publish_timeout_ms",
    ),
    ({"kafka": {"first_start": "soon"}}, "kafka.first_start = 'soon': use earliest, latest or a"),
    (
        {"kafka": {"first_start": "2026-01-31T12:00:00"}},
        "kafka.first_start = '2026-01-31T12:00:00': use earliest, latest or a time with zone",
    ),
    ({"kafka": {"group_protocol": "next"}}, "kafka.group_protocol = 'next': Input should be"),
    (
        {"kafka": {"max_poll_interval_ms": 12_000}},
        "kafka.session_timeout_ms = 12000: must be below max_poll_interval_ms = 12000",
    ),
]


@pytest.mark.parametrize(("content", "expected"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: Any, expected: str) -> None:
    (line,) = lines_of(tmp_path, content)
    assert line.startswith("settings.yaml: ")
    assert expected in line


BAD_VARIABLES = [
    ("KAFKA__GRUOP", "x", "'**********': names no setting: remove it or correct its name"),
    ("KAFKA_GROUP", "x", "names no setting"),
    ("KAFKA", "{}", "names no setting"),
    ("kafka__group", "x", "names no setting"),
    ("KAFKA__GROUP__X", "x", "names no setting"),
    ("KAFKA__CLIENT__", "x", "names no setting"),
    ("POLICIES__0", "x", "names no setting"),
    ("", "x", "names no setting"),
    ("KAFKA__GROUP", "", "'': String should match pattern"),
    ("BATCH__MAX_ROWS", "many", "'many': Input should be a valid integer"),
    ("BATCH__MAX_ROWS", "", "'': Input should be a valid integer"),
    ("BATCH__MAX_ROWS", "1.5", "1.5: Input should be a valid integer"),
    ("KAFKA__STATIC_MEMBERSHIP", "1", "1: Input should be a valid boolean"),
    ("KAFKA__TRANSACTION_TIMEOUT_MS", "5", "5: raise it to 20000"),
    ("KAFKA__CLIENT__GROUP_ID", "x", "'x': set kafka.group instead"),
    ("KAFKA__CLIENT", f"sasl.password={PASSWORD}", "'**********': Input should be an object"),
    ("SASL_PASSWORD", PASSWORD, "'**********': names no setting"),
]


@pytest.mark.parametrize(("name", "text", "expected"), BAD_VARIABLES)
def test_a_mistake_in_the_environment_is_named(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (line,) = lines_of(tmp_path, **{name: text})
    assert line.startswith(f"environment: PROCESSOR_{name} = ")
    assert expected in line


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    content = {"kafka": {"gruop": "x"}, "batch": {"max_rows": 0}}
    assert [line.split(" = ")[0] for line in lines_of(tmp_path, content, MODEL__DEVICE="tpu")] == [
        "environment: PROCESSOR_MODEL__DEVICE",
        "settings.yaml: batch.max_rows",
        "settings.yaml: kafka.gruop",
    ]
    assert len(lines_of(tmp_path, None, A="1", B="2")) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml: settings = .*: no such file"):
        load_settings(tmp_path / "no.yaml", {})


def test_what_kubernetes_sets_for_a_service_is_no_setting(tmp_path: Path) -> None:
    links = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_METRICS": "80",
        "PORT": "tcp://10.0.0.1:80",
        "PORT_80_TCP": "tcp://10.0.0.1:80",
        "PORT_80_TCP_ADDR": "10.0.0.1",
        "KAFKA_SERVICE_HOST": "10.0.0.2",
        "KAFKA_PORT_9092_TCP_PROTO": "tcp",
    }
    assert load(tmp_path, **links) == load(tmp_path)


OVERRIDES = [
    ("bootstrap.servers", "set kafka.bootstrap_servers instead"),
    ("metadata.broker.list", "set kafka.bootstrap_servers instead"),
    ("group.id", "set kafka.group instead"),
    ("transactional.id", "set kafka.transactional_id_prefix instead"),
    ("group.instance.id", "set kafka.static_membership instead"),
    ("transaction.timeout.ms", "set kafka.transaction_timeout_ms instead"),
    ("auto.offset.reset", "set kafka.auto_offset_reset instead"),
    ("enable.auto.commit", "exactly-once rests on it: remove it"),
    ("enable.auto.offset.store", "exactly-once rests on it: remove it"),
    ("isolation.level", "exactly-once rests on it: remove it"),
    ("enable.idempotence", "exactly-once rests on it: remove it"),
    ("acks", "exactly-once rests on it: remove it"),
    ("group.protocol", "set kafka.group_protocol instead"),
    ("partition.assignment.strategy", "exactly-once rests on it: remove it"),
    ("enable.partition.eof", "exactly-once rests on it: remove it"),
    ("Socket.Timeout.Ms", "not how a librdkafka property is written"),
    ("socket_timeout_ms", "not how a librdkafka property is written"),
]


@pytest.mark.parametrize(("name", "expected"), OVERRIDES)
def test_a37_what_exactly_once_rests_on_cannot_be_overridden(
    tmp_path: Path, name: str, expected: str
) -> None:
    (line,) = lines_of(tmp_path, {"kafka": {"client": {name: "x"}}})
    assert line.startswith(f"settings.yaml: kafka.client.{name} = 'x': {expected}")


SECRETS = [
    *("sasl.password", "ssl.key.password", "ssl.keystore.password", "ssl.key.pem"),
    *("sasl.oauthbearer.client.secret", "sasl.oauthbearer.config", "sasl.jaas.config"),
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_works_and_is_never_shown(tmp_path: Path, name: str) -> None:
    settings = load(tmp_path, {"kafka": {"client": {name: PASSWORD, "client.id": "me"}}})
    assert settings.kafka.client[name] == PASSWORD
    assert f"{settings.kafka.client[name]}" == PASSWORD
    shown = [
        *(str(settings), repr(settings), f"{settings.kafka}", repr(settings.kafka.client)),
        *(repr(dict(settings.kafka.client)), pprint.pformat(dict(settings.kafka))),
        *(str(settings.model_dump()), str(settings.model_dump(mode="json"))),
        *(settings.model_dump_json(), yaml.safe_dump(settings.model_dump(mode="json"))),
        repr(settings.model_copy(deep=True)),
    ]
    assert not [text for text in shown if PASSWORD in text]
    assert all("'me'" in text for text in shown[:5])


SPILLS: list[dict[str, Any]] = [
    {"kafka": {"client": {"sasl.password": PASSWORD}, "transaction_timeout_ms": 1}},
    {"kafka": {"client": {"sasl.password": [PASSWORD]}}},
    {"kafka": {"client": {"sasl.password": PASSWORD, "acks": "1"}}},
    {"kafka": {"client": [{"sasl.password": PASSWORD}]}},
    {"kafka": {"client": f"sasl.password={PASSWORD}"}},
    {"kafka": {"sasl_password": PASSWORD}},
    {"kafka": [{"client": {"sasl.password": PASSWORD}}]},
    {"kafkas": {"client": {"ssl.key.pem": PASSWORD}}},
    {"password": PASSWORD},
]


@pytest.mark.parametrize("content", SPILLS, ids=range(len(SPILLS)))
def test_no_mistake_spills_a_secret(tmp_path: Path, content: dict[str, Any]) -> None:
    assert len(lines_of(tmp_path, content)) == 1


def test_no_mistake_in_code_spills_a_secret() -> None:
    with pytest.raises(ValidationError) as caught:
        KafkaSettings(client={"sasl.password": PASSWORD}, transaction_timeout_ms=1)
    assert PASSWORD not in str(caught.value)


NAMES = [
    ("processor-3", "3"),
    ("processor-12.processor.fraud.svc", "12"),
    ("processor-7d9f8b6c5d-x2x4z", "0"),
    ("3f2a9c1b77e0", "0"),
    ("laptop", "0"),
]


@pytest.mark.parametrize(("host", "replica"), NAMES)
def test_a35_ids_are_stable_per_replica(
    monkeypatch: pytest.MonkeyPatch, host: str, replica: str
) -> None:
    monkeypatch.setattr("platform.node", lambda: host)
    kafka = KafkaSettings(group="fraud", transactional_id_prefix="shop")
    assert kafka.transactional_id == kafka.group_instance_id == f"shop-fraud-{replica}"
    assert KafkaSettings(static_membership=False).group_instance_id is None


def test_a31_membership_is_static_where_that_helps() -> None:
    """With KIP-848 a static member is not let back in before its session has ended."""
    assert KafkaSettings(group_protocol="consumer").group_instance_id is None
    assert KafkaSettings(group_protocol="consumer", static_membership=True).group_instance_id
    KafkaSettings(group_protocol="consumer", session_timeout_ms=600_000)  # is the broker's there


def test_settings_are_frozen() -> None:
    settings = load_settings(None, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.kafka.group = "x"
