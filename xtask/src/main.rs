//! The commands of the kvdock tree: `cargo xtask COMMAND`.

mod bench;
mod check;
mod cuda;
mod gpu;
mod model;
mod mooncake;
mod paths;
mod process;
mod quickstart;
mod server;
mod setup;
mod soak;
mod test;
mod tiny_models;
mod umbp;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Commands of the kvdock tree.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build kvdock, fetch a small real model, and serve it with the file plugin.
    Quickstart(quickstart::Options),
    /// Install what the tests need, and fetch the model.
    Setup,
    /// Install what the tests need, build the plugins, and run every test.
    Test(test::Options),
    /// Run the long versions of the soak tests.
    Soak(soak::Options),
    /// Real Mooncake services, to try the Mooncake plugin with.
    #[command(subcommand)]
    Mooncake(mooncake::Action),
    /// Real UMBP services, to try the UMBP plugin with.
    #[command(subcommand)]
    Umbp(umbp::Action),
    /// Write small checkpoints of every model family.
    TinyModels(tiny_models::Options),
    /// Compile every CUDA kernel for the served architectures, without a GPU, and print what each takes.
    CudaCompile(cuda::Options),
    /// Check kernels, models and stored pages on this machine's NVIDIA GPU, and print a table of timings.
    GpuCheck(gpu::CheckOptions),
    /// Make a folder with the same checks for a machine without Rust.
    GpuBundle(gpu::BundleOptions),
    /// Measure kvdock beside its peers and the machine's limits, in one run.
    Bench(bench::Options),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Quickstart(options) => quickstart::run(&options),
        Command::Setup => test::set_up(&mut process::Stages::default()).map(|()| ExitCode::SUCCESS),
        Command::Test(options) => test::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Mooncake(action) => mooncake::act(&action),
        Command::Umbp(action) => umbp::act(&action),
        Command::TinyModels(options) => tiny_models::write(&options),
        Command::CudaCompile(options) => cuda::run(&options),
        Command::GpuCheck(options) => gpu::check(&options),
        Command::GpuBundle(options) => gpu::bundle(&options),
        Command::Bench(options) => bench::run(&options),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
