//! The other sides: the published UMBP client in a process of its own, and a copy in memory.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use kvdock_tests::paths;
use serde_json::{Value, json};

use super::BATCH;
use crate::asked::Asked;

/// The release that `cargo xtask bench` fetches.
const RELEASE: &str = "1.2.4";

/// A store of the real UMBP.
pub struct Peer {
    asked: Asked,
    /// Batches that were put.
    put: u64,
    /// Batches that were got.
    got: u64,
    /// Objects of a batch, in bytes, where they are to come from the disk.
    on_disk: Option<u64>,
    not_read: u64,
}

impl Peer {
    /// Starts one for objects of so many bytes, in memory or in a folder, with `slots` for what is on its way from or to the disk; or says why there can
    /// be none here.
    ///
    /// # Errors
    /// When it is here and does not work.
    pub fn start(disk: bool, bytes: u64, slots: u64, capacity: u64, folder: &Path) -> Result<Result<Peer, String>> {
        let (root, home) = (paths::workspace(), paths::workspace().join(format!(".cache/umbp-{RELEASE}")));
        // Libraries of it do not find their way through links.
        let Ok(home) = home.canonicalize() else { return Ok(Err(format!("the real UMBP {RELEASE} is not here"))) };
        let mut command = Command::new(root.join("plugins/umbp/tests/peer/run.sh"));
        command
            .arg(home)
            .arg("python")
            .arg(root.join("benches/peers/umbp.py"))
            // Of objects that are read, it keeps room reserved for as long; by default for seconds.
            .envs([
                ("UMBP_SSD_READ_LEASE_MS", "1"),
                ("UMBP_DRAM_READ_LEASE_MS", "1"),
                ("MORI_GLOBAL_LOG_LEVEL", "error"),
            ]);
        let mut asked = Asked::start("the real UMBP", &mut command)?;
        let medium = if disk { "ssd" } else { "dram" };
        match asked.ask(&json!(["open", medium, bytes, BATCH, slots, capacity, folder])) {
            Ok(_) => Ok(Ok(Peer { asked, put: 0, got: 0, on_disk: disk.then_some(bytes * BATCH), not_read: 0 })),
            Err(error) => match asked.end()? {
                Some(3) => Ok(Err("there is no CPython 3.12, for which the real UMBP client is made".to_owned())),
                _ => Err(error),
            },
        }
    }

    /// Seconds of putting so many new batches.
    ///
    /// # Errors
    /// When it does not take them all.
    pub fn put(&mut self, calls: u64) -> Result<f64> {
        let first = self.put;
        self.put += calls;
        self.asked.seconds(&json!(["put", first, calls]))
    }

    /// Puts so many batches at least, those of before counted.
    ///
    /// # Errors
    /// When it does not take them all.
    pub fn fill(&mut self, batches: u64) -> Result<()> {
        while self.put < batches {
            self.put((batches - self.put).min(16))?;
        }
        Ok(())
    }

    /// Seconds of getting some of the `kept` batches that were put last, each time others.
    ///
    /// # Errors
    /// When it does not have them all.
    pub fn get(&mut self, calls: u64, kept: u64) -> Result<f64> {
        let first = self.put.saturating_sub(kept);
        let batches: Vec<u64> = (self.got..self.got + calls).map(|batch| first + batch % kept.max(1)).collect();
        self.got += calls;
        let answer = self.asked.ask(&json!(["get", batches]))?;
        let seconds = answer.get(0).and_then(Value::as_f64).context("the real UMBP answers with seconds")?;
        if let (Some(bytes), Some(read)) = (self.on_disk, answer.get(1).and_then(Value::as_u64)) {
            self.not_read += (bytes * calls).saturating_sub(read);
        }
        Ok(seconds)
    }

    /// Bytes that it did not get from the disk although they lie there.
    pub fn not_read(&self) -> u64 {
        self.not_read
    }
}

/// As much memory as a store goes through before it comes back to where it was.
const ROOM: usize = 1 << 30;

/// Copies batches into fresh memory and back, by as many threads as the machine has use for.
pub struct PlainCopy {
    batch: Vec<u8>,
    room: Vec<u8>,
    at: usize,
    threads: usize,
}

impl PlainCopy {
    /// For batches of so many objects.
    pub fn new(bytes: u64, objects: u64) -> PlainCopy {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
        PlainCopy { batch: vec![1; (bytes * objects) as usize], room: vec![2; ROOM], at: 0, threads }
    }

    /// Seconds of so many batches.
    pub fn run(&mut self, inwards: bool, calls: u64) -> f64 {
        let (len, share) = (self.batch.len(), self.batch.len().div_ceil(self.threads));
        let begin = Instant::now();
        for _ in 0..calls {
            if self.at + len > ROOM {
                self.at = 0;
            }
            let place = self.room.get_mut(self.at..self.at + len).unwrap_or_default();
            let batch = self.batch.as_mut_slice();
            let (from, to) = if inwards { (batch, place) } else { (place, batch) };
            std::thread::scope(|scope| {
                let mut parts = to.chunks_mut(share).zip(from.chunks(share));
                let first = parts.next();
                for (to, from) in parts {
                    scope.spawn(move || to.copy_from_slice(from));
                }
                if let Some((to, from)) = first {
                    to.copy_from_slice(from);
                }
            });
            self.at += len;
        }
        begin.elapsed().as_secs_f64()
    }
}
