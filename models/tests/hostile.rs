//! Checkpoints of the families beyond the dense one with something wrong in them: each is refused with the file, the place
//! and what would be right, or runs; nothing panics, and nothing is taken at its word.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::header::Header;
use common::pools::{Place, PoolSession};
use common::try_load;
use kvdock_kernels::KvDtype;
use kvdock_models::testing::Fixture;
use kvdock_models::{Logits, NoHooks, PooledBatch, PooledChunk, Want};
use serde_json::{Value, json};

/// The error of loading `dir`.
fn refusal(dir: &Path, what: &str) -> String {
    match try_load(dir) {
        Ok(_) => panic!("{what}: loads"),
        Err(error) => error.to_string(),
    }
}

/// Calls `each` with every fixture in a folder of its own.
fn in_every_family(each: impl Fn(&str, &Path, &Header)) {
    for name in Fixture::NAMES {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(name).unwrap().write(dir.path()).unwrap();
        each(name, dir.path(), &Header::read(dir.path()));
    }
}

#[test]
fn a_tensor_that_is_missing_is_named() {
    in_every_family(|family, dir, header| {
        for name in header.kinds() {
            let mut entries = header.entries.clone();
            let entry = entries.remove(&name).unwrap();
            entries.insert("unused".to_owned(), entry);
            header.write(&entries);
            // Without this one there is no such layer.
            if name == "mtp.0.enorm.weight" {
                assert!(try_load(dir).unwrap().spec().draft_pools.is_empty());
                continue;
            }
            let error = refusal(dir, &name);
            // Where weights may be kept in several ways, one of them is asked for.
            let parent = name.trim_end_matches(".weight").rsplit_once('.').map_or(name.as_str(), |(parent, _)| parent);
            let named = error.contains("tensor \"") && error.contains(parent) && error.contains("found none");
            assert!(named && error.contains(dir.to_str().unwrap()), "{family} {name}: {error}");
        }
    });
}

#[test]
fn a_tensor_of_another_shape_or_type_is_named() {
    in_every_family(|family, dir, header| {
        for name in header.kinds() {
            let entry = &header.entries[&name];
            let mut shape = entry["shape"].as_array().unwrap().clone();
            shape.insert(0, json!(1));
            let dtype = match entry["dtype"].as_str().unwrap() {
                "F32" => "I32",
                "BF16" => "I16",
                "I64" => "U64",
                _ => "BOOL",
            };
            for (key, value) in [("shape", json!(shape)), ("dtype", json!(dtype))] {
                let mut entries = header.entries.clone();
                entries[&name][key] = value.clone();
                header.write(&entries);
                let error = refusal(dir, &name);
                let named = error.contains(&format!("tensor \"{name}\""));
                let found =
                    if key == "shape" { format!("shape {}", shape_text(&value)) } else { format!("type {dtype}") };
                assert!(named && error.contains(&found), "{family} {name} {key}: {error}");
            }
        }
    });
}

fn shape_text(shape: &Value) -> String {
    let extents: Vec<String> = shape.as_array().unwrap().iter().map(Value::to_string).collect();
    format!("[{}]", extents.join(", "))
}

/// Paths to all values of a configuration, as JSON pointers.
fn pointers(value: &Value, path: &str, out: &mut Vec<String>) {
    match value {
        Value::Object(object) => {
            object.iter().for_each(|(key, value)| pointers(value, &format!("{path}/{key}"), out));
        }
        // The first and the last of a list stand for the others.
        Value::Array(list) => {
            out.push(path.to_owned());
            for index in [0, list.len().saturating_sub(1)] {
                list.get(index).into_iter().for_each(|value| pointers(value, &format!("{path}/{index}"), out));
            }
        }
        _ => out.push(path.to_owned()),
    }
}

#[test]
fn absurd_values_in_a_configuration_are_named_or_run() {
    let absurd = [json!(-1), Value::Null, json!(0), json!(1 << 24), json!(u64::MAX), json!(1e300)];
    // Another fixture has all of its keys.
    for name in Fixture::NAMES.into_iter().filter(|name| *name != "gpt_oss_mxfp4") {
        let dir = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(name).unwrap();
        fixture.write(dir.path()).unwrap();
        let mut places = Vec::new();
        pointers(&fixture.config, "", &mut places);
        for place in places {
            // Sizes only where there are numbers: elsewhere one number is as wrong as another.
            let count = if fixture.config.pointer(&place).unwrap().is_number() { absurd.len() } else { 2 };
            for value in &absurd[..count] {
                let mut config = fixture.config.clone();
                *config.pointer_mut(&place).unwrap() = value.clone();
                std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
                match try_load(dir.path()) {
                    // A few tokens run, or are refused: other settings may be another sound model.
                    Ok(model) => {
                        let page = 16usize.next_multiple_of(model.spec().page_multiple);
                        let session = PoolSession::new(model.clone(), KvDtype::F32, page, 3);
                        let pages = Place::first(3);
                        let chunk = PooledChunk {
                            tokens: &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
                            start: 0,
                            logits: Want::All,
                            pages: &pages.pages,
                            window: &pages.window,
                            slot: Some(0),
                            save: &[],
                        };
                        let batch = PooledBatch { seqs: &[chunk] };
                        let ran = model.model.forward_pools(&batch, &session.pools, &NoHooks, &mut Logits::new());
                        // A panic in a task of the device comes as this error.
                        let panicked = ran.is_err_and(|error| error.to_string().contains("a worker of the device"));
                        assert!(!panicked, "{name} {place} {value}");
                    }
                    Err(error) => {
                        let error = error.to_string();
                        let named = error.contains("config.json") || error.contains("tensor \"");
                        assert!(
                            named && error.contains(dir.path().to_str().unwrap()),
                            "{name} {place} {value}: {error}"
                        );
                    }
                }
            }
        }
    }
}
