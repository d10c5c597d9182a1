//! The `kvdock` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvdock::cli::main()
}
