//! Writes a tiny checkpoint: `cargo run --release -p kvdock-models --example tiny -- MODEL DIR`, MODEL being
//! llama, qwen2 or qwen3, the tiny Llama with its rotary embedding stretched (llama3, yarn or linear), or one of
//! [`Fixture::NAMES`]; `all` writes all of them, each into a folder of its own below DIR.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use kvdock_models::testing::{Fixture, TinyKind, TinyModel};

const STRETCHED: [&str; 3] = ["llama3", "yarn", "linear"];

/// Writes the model called `name`, if there is one.
fn write(name: &str, dir: &Path) -> Option<io::Result<()>> {
    if let Some(fixture) = Fixture::new(name) {
        return Some(fixture.write(dir));
    }
    if let Some(kind) = TinyKind::ALL.into_iter().find(|kind| kind.name() == name) {
        return Some(TinyModel::new(kind).write_hf(dir));
    }
    STRETCHED.contains(&name).then(|| TinyModel::stretched(name).write_hf(dir))
}

fn names() -> impl Iterator<Item = &'static str> {
    TinyKind::ALL.into_iter().map(TinyKind::name).chain(STRETCHED).chain(Fixture::NAMES)
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(dir)) = (args.next(), args.next()) else {
        eprintln!("usage: tiny all|{} DIR", names().collect::<Vec<_>>().join("|"));
        return ExitCode::FAILURE;
    };
    let dir = Path::new(&dir);
    let models: Vec<(&str, std::path::PathBuf)> = match name.as_str() {
        "all" => names().map(|name| (name, dir.join(name))).collect(),
        name => vec![(name, dir.to_path_buf())],
    };
    for (name, dir) in models {
        match write(name, &dir) {
            Some(Ok(())) => println!("{}", dir.display()),
            Some(Err(error)) => {
                eprintln!("cannot write the checkpoint {}: {error}", dir.display());
                return ExitCode::FAILURE;
            }
            None => {
                eprintln!("no tiny model is called {name}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
