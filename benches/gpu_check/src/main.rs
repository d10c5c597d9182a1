//! `kvdock-gpu-check`: everything that has to be checked where there is a GPU, in one run.
//!
//! It compares the kernels and whole models with the CPU's, stores pages that the GPU has computed and takes them back in a new process, and
//! prints a table of timings. `cargo xtask gpu-check` builds and runs it; `cargo xtask gpu-bundle` makes a folder with it that needs nothing but
//! an NVIDIA driver.

mod cublas;
mod kernels;
mod latent;
mod served;
mod table;
mod timings;
mod torch;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use kvdock_cuda::{Arithmetic, Cubins, Search, Unit};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::ops::RowFormat;
use kvdock_kernels::{Device, KvDtype, WeightFormat};
use kvdock_models::testing::{Course, Fixture, TinyKind, TinyModel, agreement, token_ids};

use table::Table;

/// Checks kvdock on a GPU.
#[derive(Parser)]
#[command(name = "kvdock-gpu-check", disable_help_subcommand = true)]
struct Arguments {
    /// Only the small comparisons of kernels: for compute-sanitizer, under which everything takes long.
    #[arg(long)]
    small: bool,
    /// Number of the GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Write the table of timings here as well.
    #[arg(long)]
    table: Option<PathBuf>,
    /// Compile the machine code that a bundle needs into this folder, and do nothing else. Needs NVRTC, and no GPU.
    #[arg(long, value_name = "FOLDER")]
    make_code: Option<PathBuf>,
}

/// Architectures that a bundle has machine code for.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.make_code {
        Some(folder) => make_code(folder),
        None => check(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// The units that the checks use.
fn units() -> Vec<Unit> {
    let mut units = vec![
        Unit::Norm,
        Unit::Elementwise,
        Unit::Rope,
        Unit::KvWrite,
        Unit::Heads,
        Unit::Gguf,
        Unit::PageCopy,
        Unit::Seal,
    ];
    for format in kernels::FORMATS {
        units.extend([1, 2].map(|parts| Unit::Matmul { format, parts }));
    }
    for (dtype, dims, groups) in kernels::HEADS.iter().chain(&timings::HEADS).chain(&MODEL_HEADS) {
        let (dim_k, dim_v) = *dims;
        let tiles = *dtype != KvDtype::F32 && dim_k % 16 == 0 && dim_v % 16 == 0;
        if tiles {
            units.push(Unit::Prefill { dtype: *dtype, dim_k, dim_v });
        }
        if *dtype != KvDtype::F32 && dim_k % 64 == 0 && dim_v % 64 == 0 {
            units.push(Unit::PrefillHopper { dtype: *dtype, dim_k, dim_v });
        }
        units.extend(groups.iter().map(|group| match tiles {
            true => Unit::DecodeTiles { dtype: *dtype, dim_k, dim_v, group: *group },
            false => Unit::Decode { dtype: *dtype, dim_k, dim_v, group: *group },
        }));
    }
    units.extend([
        Unit::Moe,
        Unit::Narrow,
        Unit::Rows,
        Unit::Index,
        Unit::IndexTiles { parts: 2 },
        Unit::Compress,
        Unit::Delta,
        Unit::Hyper,
        Unit::Sampling,
    ]);
    units.extend(FAMILY_ROWS.map(|(format, width, value)| match format {
        RowFormat::Packed { .. } => Unit::LatentTiles { format, width, value, heads: 16, parts: 2 },
        _ => Unit::Latent { format, width, value },
    }));
    units.extend(latent::UNITS);
    let mut seen = std::collections::HashSet::new();
    units.retain(|unit| seen.insert(*unit));
    units
}

/// Heads of the tiny models and of the small real one: element type, dimensions, groups.
const MODEL_HEADS: [kernels::Heads; 7] = [
    (KvDtype::F16, (16, 16), &[2]),
    (KvDtype::F16, (32, 32), &[2]),
    (KvDtype::F16, (64, 64), &[2, 3]),
    (KvDtype::F32, (16, 16), &[2]),
    (KvDtype::BF16, (32, 32), &[2]),
    (KvDtype::F32, (32, 32), &[2]),
    (KvDtype::F32, (24, 16), &[2, 4]),
];

/// Rows that are keys and values at once, in the tiny models of families: format, elements of key and of value.
const FAMILY_ROWS: [(RowFormat, u32, u32); 3] = [
    (RowFormat::Plain(KvDtype::F32), 40, 32),
    (RowFormat::Plain(KvDtype::F32), 32, 32),
    (RowFormat::Packed { rope: 64 }, 512, 512),
];

/// Tiny models of families beyond the dense one, and whether rows are packed.
const FAMILIES: [(&str, bool); 10] = [
    ("qwen3_moe", false),
    ("gpt_oss", false),
    ("gpt_oss_mxfp4", false),
    ("mimo", false),
    ("qwen3_5", false),
    ("qwen3_next", false),
    ("glm_dsa", false),
    ("deepseek_v32", false),
    ("dsv4", false),
    ("dsv4q", true),
];

fn make_code(folder: &std::path::Path) -> Result<(), String> {
    for architecture in ARCHITECTURES {
        let cubins = Cubins::new(architecture, kvdock_cuda::compiler(&Search::usual(), None), None, None);
        for unit in units().into_iter().filter(|unit| unit.is_for(architecture)) {
            let path = cubins.make_ready(unit, folder).map_err(|error| error.to_string())?;
            println!("{}", path.display());
        }
    }
    Ok(())
}

fn check(arguments: &Arguments) -> Result<(), String> {
    let began = Instant::now();
    let open = |arithmetic| {
        let device =
            kvdock_cuda::open(&Search::usual(), arguments.device, arithmetic).map_err(|error| format!("no {error}"))?;
        Ok::<Arc<dyn Device>, String>(Arc::new(device))
    };
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let cpu: Arc<dyn Device> = Arc::new(CpuDevice::new(cpus).map_err(|error| error.to_string())?);
    let mut failures = Vec::new();
    let mut judge = |what: String, result: Result<String, String>| match result {
        Ok(found) => println!("ok      {what}: {found}"),
        Err(reason) => {
            println!("FAILED  {what}: {reason}");
            failures.push(what);
        }
    };
    for arithmetic in [Arithmetic::Reproducible, Arithmetic::Fast] {
        let device = open(arithmetic)?;
        println!("{}, {} arithmetic", device.name(), arithmetic.name());
        for check in kernels::checks(arguments.small) {
            judge(check.name.clone(), check.run(cpu.as_ref(), device.as_ref(), arithmetic));
        }
        if arguments.small {
            continue;
        }
        for (kind, format, dtype, tolerance) in [
            (TinyKind::Llama, WeightFormat::Q4_K, KvDtype::F16, 3e-2),
            (TinyKind::Qwen2, WeightFormat::F16, KvDtype::F32, 2e-2),
            (TinyKind::Qwen3, WeightFormat::BF16, KvDtype::BF16, 4e-2),
        ] {
            let result = model(kind, format, dtype, tolerance, &cpu, &device);
            judge(format!("tiny {} in {}, {} pages", kind.name(), format.name(), dtype.name()), result);
        }
        for (name, packed) in FAMILIES {
            let with = if packed { ", packed rows" } else { "" };
            judge(format!("tiny {name}{with}"), family(name, packed, &cpu, &device));
        }
    }
    if !arguments.small {
        judge("storage round trip from device pages".to_owned(), served::round_trip(arguments.device));
        let device = open(Arithmetic::Fast)?;
        let mut table = Table::new(device.name());
        match timings::measure(device.as_ref(), arguments.device, &mut table) {
            Ok(()) => {
                let compared = cublas::measure(device.as_ref(), arguments.device, &mut table);
                judge("a product beside cuBLASLt".to_owned(), compared.map(|()| "as the table says".to_owned()));
                torch::measure(&mut table);
            }
            Err(reason) => judge("timings".to_owned(), Err(reason)),
        }
        println!("\n{}", table.text());
        if let Some(path) = &arguments.table {
            std::fs::write(path, table.text()).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    println!("{:.0} s", began.elapsed().as_secs_f64());
    match failures.len() {
        0 => Ok(()),
        count => Err(format!("{count} checks failed: {}", failures.join("; "))),
    }
}

/// Greedy decoding of a tiny model on both devices.
fn model(
    kind: TinyKind,
    format: WeightFormat,
    dtype: KvDtype,
    tolerance: f32,
    cpu: &Arc<dyn Device>,
    device: &Arc<dyn Device>,
) -> Result<String, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("tiny.gguf");
    let model = if kind == TinyKind::Llama { TinyModel::wide(kind) } else { TinyModel::new(kind) };
    model.write_gguf(&path, format).map_err(|error| format!("{}: {error}", path.display()))?;
    let prompts = [token_ids("one", 700, 256), token_ids("two", 333, 256)];
    let course =
        Course { prompts, chunk: 256, steps: 48, page_tokens: 16, dtype, all_pools: false, packed_rows: false };
    compare(&path, &course, tolerance, cpu, device)
}

/// Greedy decoding of a tiny model of another family on both devices, over all of its pools.
fn family(name: &str, packed_rows: bool, cpu: &Arc<dyn Device>, device: &Arc<dyn Device>) -> Result<String, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let fixture = Fixture::new(name).ok_or_else(|| format!("no tiny model is called {name}"))?;
    fixture.write(folder.path()).map_err(|error| format!("{}: {error}", folder.path().display()))?;
    let prompts = [token_ids("one", 300, 256), token_ids("two", 90, 256)];
    let course =
        Course { prompts, chunk: 128, steps: 8, page_tokens: 16, dtype: KvDtype::F32, all_pools: true, packed_rows };
    compare(folder.path(), &course, 2e-2, cpu, device)
}

/// Follows `course` on both devices.
fn compare(
    path: &std::path::Path,
    course: &Course,
    tolerance: f32,
    cpu: &Arc<dyn Device>,
    device: &Arc<dyn Device>,
) -> Result<String, String> {
    let found = agreement(path, course, cpu.clone(), device.clone()).map_err(|error| error.to_string())?;
    let mut text = format!(
        "{} rows, {} choose the same token, logits differ by {:.1e} of the largest at most",
        found.rows, found.same_choice, found.largest
    );
    if found.flips.flipped > 0 {
        let _ = write!(
            text,
            "; {} elements of packed rows were rounded the other way, {} rows of logits with them are not compared",
            found.flips.flipped, found.flipped_rows
        );
    }
    if found.flips.far > 0 {
        return Err(format!("{text}; {} elements of packed rows differ by more than their rounding", found.flips.far));
    }
    if found.wrong_choice > 0 || found.largest > tolerance || found.rows == 0 {
        return Err(format!("{text}; {} choose another one for no small difference", found.wrong_choice));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
