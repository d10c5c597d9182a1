//! Rules of `open` and `capabilities`.

use serde_json::{Value, json};

use super::bench::Bench;
use super::{Check, Rule, Stop, ensure, fail};
use crate::{CacheMode, Capabilities, Error, ErrorKind, Result};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "open.capabilities",
        "6",
        "an instance can do no more than the note declares, and answers the same when it is asked again",
        &[capabilities],
    ),
    Rule::new(
        "open.unknown_key",
        "4",
        "a key that nobody knows is refused, by the schema or by open as an invalid config that names it",
        &[unknown_key],
    ),
    Rule::new(
        "open.wrong_value",
        "4",
        "a value of another type is refused, by the schema or by open as an invalid config that names its key",
        &[wrong_value],
    ),
];

fn capabilities(bench: &Bench) -> Check {
    let store = bench.open()?;
    let raw = store.raw_capabilities()?;
    let can = Capabilities::from_raw(&raw);
    if let Some(beyond) = can.beyond(bench.declared()) {
        return fail("an instance with no capability beyond the note", format!("{beyond}"));
    }
    ensure(raw.alignment > 0, "an alignment of 1 or more", || "0".to_owned())?;
    ensure(raw.preferred_batch > 0, "a preferred batch of 1 or more", || "0".to_owned())?;
    ensure(raw.concurrency > 0, "a concurrency of 1 or more", || "0".to_owned())?;
    ensure(raw.reserved == 0, "a reserved field of 0", || raw.reserved.to_string())?;
    ensure(can == store.capabilities, "the same answer when it is asked again", || {
        format!("{:?}, then {can:?}", store.capabilities)
    })?;
    store.close()
}

/// Opens with a configuration that a user may write: whether it got through.
fn open_with(bench: &Bench, config: &Value) -> Check<Option<Result<()>>> {
    let Ok(validator) = jsonschema::validator_for(&bench.subject.declared.config_schema) else {
        return Err(Stop::Skip("the schema is none".to_owned()));
    };
    if !validator.is_valid(config) {
        return Ok(None);
    }
    match bench.try_open(config, &bench.identity(), CacheMode::Hierarchical)? {
        Ok(store) => store.close().map(|()| Some(Ok(()))),
        Err(error) => Ok(Some(Err(error))),
    }
}

fn names_key(key: &str, answer: Option<Result<(), Error>>) -> Check {
    let expected = format!("an invalid config whose message names {key}");
    match answer {
        None => Ok(()),
        Some(Ok(())) => fail(format!("the schema or open refuses {key}"), "both took it"),
        Some(Err(error)) if error.kind != ErrorKind::InvalidConfig => fail(expected, error.to_string()),
        Some(Err(error)) => ensure(error.message.contains(key), expected, || error.to_string()),
    }
}

fn unknown_key(bench: &Bench) -> Check {
    let mut config = bench.config();
    config["no_such_key_of_this_plugin"] = json!(1);
    names_key("no_such_key_of_this_plugin", open_with(bench, &config)?)
}

fn wrong_value(bench: &Bench) -> Check {
    let properties = bench.subject.declared.config_schema.get("properties").and_then(Value::as_object).cloned();
    let Some(properties) = properties.filter(|properties| !properties.is_empty()) else {
        return Err(Stop::Skip("its schema has no keys".to_owned()));
    };
    for key in properties.keys() {
        // No key takes an object of a shape that nobody knows.
        let mut config = bench.config();
        config[key] = json!({"no_such_value": [{"at": "all"}]});
        names_key(key, open_with(bench, &config)?)?;
    }
    Ok(())
}
