//! `kvdock-bench-calls loaded|linked NUMBER`: nothing but calls, so that their instructions can be counted from outside. `kvdock-bench`
//! runs it under callgrind.

#[path = "../plugin/keys.rs"]
mod keys;
mod store;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

fn run() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (side, number) = (arguments.next(), arguments.next());
    let calls: u32 = number.context("the number of calls is missing")?.parse().context("the number of calls")?;
    let store = match side.as_deref() {
        Some("loaded") => store::Store::loaded(&kvdock_tests::paths::build().join("examples/libbench_keys.so"))?,
        Some("linked") => store::Store::linked()?,
        _ => bail!("expected loaded or linked, found {side:?}"),
    };
    store.exists(calls)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
