//! fio, the peer of the disk rows.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Which way the data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into files that are made by it.
    Write,
    /// From a file that a write made, past the page cache.
    Read,
}

/// One run of fio.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// Which way.
    pub direction: Direction,
    /// The file.
    pub file: &'a Path,
    /// Bytes of one operation.
    pub block: u64,
    /// Bytes of all.
    pub total: u64,
    /// Operations at once.
    pub depth: u32,
    /// After how many writes the file is synced; 0 for once at the end.
    pub sync_every: u32,
}

impl Job<'_> {
    /// Bytes a second.
    ///
    /// # Errors
    /// When fio can't be run or says something else.
    pub fn run(&self) -> Result<f64> {
        let (mode, field) = match self.direction {
            Direction::Write => ("write", "write"),
            Direction::Read => ("read", "read"),
        };
        let mut fio = Command::new("fio");
        fio.args(["--name=bench", "--output-format=json", "--thread", "--numjobs=1", "--overwrite=0"])
            .arg(format!("--filename={}", self.file.display()))
            .arg(format!("--rw={mode}"))
            .arg(format!("--bs={}", self.block))
            .arg(format!("--size={}", self.total))
            .arg(format!("--iodepth={}", self.depth))
            // Fresh blocks, as a page that is stored for the first time gets them.
            .args(["--ioengine=io_uring", "--direct=1", "--fallocate=none"]);
        if self.direction == Direction::Write {
            // A file of its own every time; blocks that are there already would be cheaper.
            let _ = std::fs::remove_file(self.file);
            match self.sync_every {
                0 => fio.arg("--end_fsync=1"),
                every => fio.arg(format!("--fsync={every}")),
            };
        }
        let output = fio.stdin(Stdio::null()).output().context("can't start fio")?;
        if !output.status.success() {
            bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        rate(&output.stdout, field)
    }
}

fn rate(output: &[u8], field: &str) -> Result<f64> {
    // fio may print notes before the JSON.
    let begin = output.iter().position(|byte| *byte == b'{').context("fio printed no JSON")?;
    let report: Value = serde_json::from_slice(output.get(begin..).unwrap_or_default()).context("fio's JSON")?;
    let job = report.pointer(&format!("/jobs/0/{field}")).context("fio's JSON names no job")?;
    let number =
        |name: &str| job.get(name).and_then(Value::as_f64).with_context(|| format!("fio's JSON has no {name}"));
    // fio's own rate leaves out the sync at the end; the job's whole time has it.
    let runtime = report.pointer("/jobs/0/job_runtime").and_then(Value::as_f64).unwrap_or(0.0);
    let milliseconds = runtime.max(number("runtime")?).max(1.0);
    Ok(number("io_bytes")? / milliseconds * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_counts_the_sync_at_the_end() {
        let output = br#"note
            {"jobs": [{"job_runtime": 2000, "write": {"io_bytes": 4000000, "runtime": 1000}}]}"#;
        assert_eq!(rate(output, "write").unwrap(), 2_000_000.0);
        assert!(rate(b"{}", "write").is_err());
        assert!(rate(b"nothing", "write").is_err());
    }
}
