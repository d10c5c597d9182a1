//! Writes a tiny checkpoint: `cargo run --release -p kvdock-models --example tiny -- MODEL DIR`, MODEL being
//! llama, qwen2 or qwen3, or the tiny Llama with its rotary embedding stretched: llama3, yarn or linear.

use std::path::PathBuf;
use std::process::ExitCode;

use kvdock_models::testing::{TinyKind, TinyModel};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(dir)) = (args.next(), args.next()) else {
        eprintln!("usage: tiny llama|qwen2|qwen3|llama3|yarn|linear DIR");
        return ExitCode::FAILURE;
    };
    let model = match name.as_str() {
        "llama3" | "yarn" | "linear" => TinyModel::stretched(&name),
        _ => match TinyKind::ALL.into_iter().find(|kind| kind.name() == name) {
            Some(kind) => TinyModel::new(kind),
            None => {
                eprintln!("no tiny model is called {name}");
                return ExitCode::FAILURE;
            }
        },
    };
    match model.write_hf(&PathBuf::from(&dir)) {
        Ok(()) => {
            println!("{dir}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cannot write the checkpoint: {error}");
            ExitCode::FAILURE
        }
    }
}
