//! The process that loads the plugin and calls it. What goes wrong here ends this process and not the command.

use std::io::{Read as _, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, PoolSpec, identity};
use kvdock_plugin_api::v0_1::BackendTable;
use kvdock_plugin_api::{Capabilities, ClearScope, LogLevel};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::cold::drop_cached;
use super::event::{Event, Kind, Row};
use super::measure::{Bench, Keys};
use super::plan::{KEPT_BYTES, Part, Plan, Shape, UPKEEP_DEADLINE, page_size};
use crate::plugin::library;

/// Part of the files that may stay in the page cache where reads count as cold.
const COLD: f64 = 0.02;

/// Reads the plan from standard input, carries it out, and tells what happens on standard output.
pub(in crate::cli) fn run() -> ExitCode {
    // It is in a group of its own, and so is not told when the terminal goes.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let mut text = String::new();
    let plan = std::io::stdin().read_to_string(&mut text).map_err(|error| error.to_string());
    let result = plan.and_then(|_| serde_json::from_str::<Plan>(&text).map_err(|error| error.to_string()));
    let result = result.and_then(|plan| {
        catch_unwind(AssertUnwindSafe(|| measure(&plan))).unwrap_or_else(|panic| Err(super::panicked(&*panic)))
    });
    tell(&match result {
        Ok(()) => Event::Done,
        Err(text) => Event::Failed { text },
    });
    ExitCode::SUCCESS
}

fn tell(event: &Event) {
    let Ok(mut line) = serde_json::to_string(event) else { return };
    line.push('\n');
    // One write a line, so that what the plugin prints does not come between. Whoever listened may be gone.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

fn doing(what: impl Into<String>) {
    tell(&Event::Doing { what: what.into() });
}

fn note(text: impl Into<String>) {
    tell(&Event::Note { text: text.into() });
}

fn measure(plan: &Plan) -> Result<(), String> {
    doing("loading the plugin");
    let library = library::load(&plan.plugin, None).map_err(|refusal| refusal.to_string())?;
    let host = MockHost::new();
    let table = library.table().ok_or("its note names no ABI version 0.1, by which plugins are measured")?;
    let mut work = Work { plan, table, host, until: Instant::now() + plan.total(), kept: 0, shapes: 0 };
    let (end, steps) = (work.until, plan.steps());
    let result = steps.iter().zip((1..=steps.len() as u32).rev()).try_for_each(|((page_bytes, part), to_come)| {
        // Who was quick leaves more to those that come.
        let now = Instant::now();
        work.until = now + end.saturating_duration_since(now) / to_come;
        work.page_size(*page_bytes, *part)
    });
    result.map_err(|error| with_log(error, &host))
}

/// The last words of the plugin say more than an error alone.
fn with_log(error: String, host: &MockHost) -> String {
    let logs = host.logs();
    let loud = logs.iter().rev().filter(|line| matches!(line.level, LogLevel::Error | LogLevel::Warn)).take(3);
    loud.fold(error, |text, line| format!("{text}\nthe plugin logged ({}): {}", line.target, line.message))
}

struct Work<'a> {
    plan: &'a Plan,
    table: &'static BackendTable,
    host: MockHost,
    /// When the share of the step under way is over.
    until: Instant,
    /// Bytes that were stored and could not be removed.
    kept: u64,
    shapes: u64,
}

/// An open instance with its pool.
struct Attached {
    instance: Instance,
    pool: MockPool,
    capabilities: Capabilities,
}

impl Work<'_> {
    fn attach(&self, pool: MockPool) -> Result<Attached, String> {
        doing("open and registration");
        let config = serde_json::Value::Object(self.plan.config.clone()).to_string();
        let options = Options { deadline: Some(UPKEEP_DEADLINE), ..Options::default() };
        let instance = Instance::open(&self.host, self.table, &config, &identity("kvdock plugin bench"), &options)
            .map_err(|error| format!("open: {error}"))?;
        let capabilities = instance.capabilities().map_err(|error| format!("capabilities: {error}"))?;
        instance.register(&pool).map_err(|error| format!("register_mem_pool_host: {error}"))?;
        instance.ready().map_err(|error| format!("pools_ready: {error}"))?;
        Ok(Attached { instance, pool, capabilities })
    }

    fn page_size(&mut self, page_bytes: u64, part: Part) -> Result<(), String> {
        if part == Part::Rest && Instant::now() >= self.until {
            self.left_out(&format!("the other batches of {}", page_size(page_bytes)));
            return Ok(());
        }
        let pages = (self.plan.pool_bytes / page_bytes).max(1);
        // Two pieces, K and V, as in most layouts.
        let spec = PoolSpec::bytes(0, "kv", pages, &[page_bytes / 2, page_bytes - page_bytes / 2]);
        let pool = MockPool::new(spec);
        let attached = self.attach(pool)?;
        let (shapes, too_big) = self.plan.shapes(page_bytes, attached.capabilities.concurrency);
        let in_part = |shapes: Vec<Shape>| shapes.into_iter().filter(|shape| part.has(shape)).collect::<Vec<_>>();
        let (shapes, too_big) = (in_part(shapes), in_part(too_big));
        let used = shapes.iter().map(Shape::pages).max().unwrap_or(1);
        // Noise: nothing to compress, and no page is equal to another.
        (0..used as u32).for_each(|page| attached.pool.fill(page, u64::from(page)));
        let mut copies = Vec::new();
        for shape in shapes {
            // Something is said of each size, however slow the plugin is.
            let owed = part == Part::First && copies.is_empty();
            if !owed && Instant::now() >= self.until {
                self.left_out(&describe(shape));
                continue;
            }
            copies.push((shape, self.shape(&attached, shape)?));
        }
        for shape in too_big {
            note(format!("{} left out: they need more memory than the pool may have", describe(shape)));
        }
        self.cold(attached, &copies, part)?;
        // What lies in our own folder goes with it; a store of the user's was emptied by `clear`.
        if let Some(scratch) = &self.plan.scratch {
            let emptied = std::fs::remove_dir_all(scratch).and_then(|()| std::fs::create_dir(scratch));
            emptied.map_err(|error| format!("{}: {error}", scratch.display()))?;
            self.kept = 0;
        }
        Ok(())
    }

    fn left_out(&self, what: &str) {
        let seconds = self.plan.total().as_secs();
        note(format!("time is up: {what} left out; --seconds gives more than the {seconds} of this run"));
    }

    /// Measures one shape. Answers pages a second of the copy.
    fn shape(&mut self, attached: &Attached, shape: Shape) -> Result<f64, String> {
        let bench = Bench { instance: &attached.instance, pool: &attached.pool, slice: self.plan.slice() };
        let copy = bench.copy(shape)?;
        let of_copy = copy.pages_per_second;
        tell(&Event::Row(copy));
        if self.kept >= KEPT_BYTES {
            note(format!("{} left out: the store can't be emptied, and has taken enough", describe(shape)));
            return Ok(of_copy);
        }
        let keys = self.next_keys();
        doing(format!("batch_set ({})", describe(shape)));
        let (row, stored) = bench.set(shape, keys, of_copy)?;
        let written = row.pages;
        self.row(row);
        if written > 0 {
            doing(format!("batch_exists ({})", describe(shape)));
            self.row(bench.exists(shape, keys, &stored)?);
            doing(format!("batch_get ({})", describe(shape)));
            self.row(bench.get(shape, keys, &stored, of_copy)?);
        }
        self.empty(attached, written * shape.page_bytes)?;
        Ok(of_copy)
    }

    fn next_keys(&mut self) -> Keys {
        self.shapes += 1;
        Keys { shape: self.shapes }
    }

    fn row(&self, row: Row) {
        let (refused, bad, call) = (row.refused, row.bad, row.call);
        let all = row.pages + refused + bad;
        tell(&Event::Row(row));
        if refused > 0 && call == Kind::Set {
            note(format!("the store is full: it refused {refused} of {all} pages; give it more room with --config"));
        }
        // What was refused is missing later, which is no fault.
        if bad > 0 && (call == Kind::Set || refused > 0) {
            note(format!("{bad} of {all} pages failed"));
        }
    }

    /// Makes room for the next shape.
    fn empty(&mut self, attached: &Attached, bytes: u64) -> Result<(), String> {
        if attached.capabilities.clear_namespace {
            doing("clear");
            let options = Options { deadline: Some(UPKEEP_DEADLINE), ..Options::default() };
            return attached.instance.clear(&options, ClearScope::Namespace).map_err(|error| format!("clear: {error}"));
        }
        self.kept += bytes;
        Ok(())
    }

    /// Reads with a new instance after the store's files were taken out of the page cache.
    fn cold(&mut self, attached: Attached, copies: &[(Shape, f64)], part: Part) -> Result<(), String> {
        let close = |attached: Attached| {
            doing("close");
            attached.instance.close().map_err(|error| format!("close: {error}"))
        };
        let (Some(scratch), Some((first, _)), Part::First) = (&self.plan.scratch, copies.first(), part) else {
            return close(attached);
        };
        if !attached.capabilities.durable {
            return close(attached);
        }
        let one = Shape { threads: 1, ..*first };
        if Instant::now() >= self.until {
            self.left_out(&format!("cold reads of {}", page_size(one.page_bytes)));
            return close(attached);
        }
        let keys = self.next_keys();
        doing(format!("batch_set ({}) for cold reads", describe(one)));
        let bench = Bench { instance: &attached.instance, pool: &attached.pool, slice: self.plan.slice() * 4 };
        let (row, stored) = bench.set(one, keys, 0.0)?;
        let batches = stored[0];
        if row.refused > 0 || row.bad > 0 || batches < 2 {
            note("no cold reads: the store did not take enough pages for them");
            return close(attached);
        }
        doing("flush");
        let options = Options { deadline: Some(UPKEEP_DEADLINE), ..Options::default() };
        attached.instance.flush(&options).map_err(|error| format!("flush: {error}"))?;
        let pool = attached.pool.clone();
        close(attached)?;
        doing("writing the files to the disk");
        let stayed = drop_cached(scratch).map_err(|error| format!("{}: {error}", scratch.display()))?;
        let again = self.attach(pool)?;
        if stayed > COLD {
            note(format!("no cold reads: {:.0}% of the files stay in memory (a tmpfs?)", stayed * 100.0));
        } else {
            let bench = Bench { instance: &again.instance, pool: &again.pool, slice: self.plan.slice() };
            let mut first = 0;
            for (shape, copy) in copies {
                // Each key once: what one shape has read is in memory for the next.
                let last = if shape.threads == 1 { batches / 2 } else { batches };
                doing(format!("batch_get ({}), cold", describe(*shape)));
                self.row(bench.get_cold(*shape, keys, first..last, *copy)?);
                first = last;
            }
        }
        close(again)
    }
}

/// A shape in words.
fn describe(shape: Shape) -> String {
    let threads = if shape.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", shape.threads) };
    format!("{} of {}, {threads}", shape.batch, page_size(shape.page_bytes))
}
