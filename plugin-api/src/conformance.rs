//! The conformance suite: every rule of the boundary, run against a backend through its C functions.
//!
//! `kvdock plugin check` runs it against a file, each rule in a process of its own. Authors run it in their own tests, with the entry function
//! linked in:
//!
//! ```
//! # use kvdock_plugin_api::{*, mock::*, v0_1::Stats};
//! # struct Refuses;
//! # impl Backend for Refuses {
//! #     type Linker = NoLinker<Self>;
//! #     fn open(_: &Open<'_>) -> Result<Self> { Ok(Refuses) }
//! #     fn batch_exists(&self, _: &mut Exists<'_>) -> Result<()> { Ok(()) }
//! #     fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
//! #         batch.into_pages().for_each(|page| page.finish(PageStatus::Missing));
//! #         Ok(())
//! #     }
//! #     fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
//! #         batch.into_pages().for_each(|page| page.finish(PageStatus::Refused));
//! #         Ok(())
//! #     }
//! #     fn stats(&self, _: &Call<'_>) -> Result<Stats> {
//! #         Ok(Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 })
//! #     }
//! # }
//! # export_plugin! {
//! #     backend: Refuses,
//! #     name: "refuses",
//! #     capabilities: Capabilities::NONE,
//! #     config_schema: r#"{"type":"object","additionalProperties":false}"#,
//! #     check_config: "{}",
//! # }
//! # fn main() {
//! use kvdock_plugin_api::conformance::Suite;
//!
//! // In the module that has `export_plugin!`, which also writes `KVDOCK_NOTE_SOURCE`.
//! let report = Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).only("load.").run();
//! report.assert_passed();
//! # }
//! ```
//!
//! A rule that looks at the whole process (threads, open files, working directory) has to be alone in it, so tests skip it unless
//! [`Suite::alone`] says that they are.

mod bench;
mod calls;
mod data;
mod declared;
mod exists;
mod isolation;
mod life;
mod linker;
mod load;
mod memory;
mod open;
mod pools;
mod remove;
mod report;
mod run;
mod status;
mod store;
mod threads;
mod time;

pub use declared::Declared;
pub use load::HOST_KEYS;
pub use report::{Entry, Finding, MOST_HANGS, Report, Verdict};
pub use run::{Limits, Subject, Suite, run_in_order, run_step};

use crate::Capability;
use bench::Bench;

/// A rule of the contract.
#[derive(Debug)]
pub struct Rule {
    /// Its name: a group and a word.
    pub id: &'static str,
    /// What a plugin promises, in one line.
    pub promise: &'static str,
    /// Where ABI.md says so.
    pub section: &'static str,
    /// Capabilities without which the rule says nothing.
    pub needs: &'static [Capability],
    /// It looks at the whole process, and so has to be alone in it.
    pub alone: bool,
    /// Its first step ends with the process, killed at work.
    pub killed: bool,
    /// What is run, one after the other with the same scratch folder, each in a process of its own where there is one for each rule.
    pub(crate) steps: &'static [Step],
}

impl Rule {
    /// Number of steps, each for a process of its own.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Rules without which this one says nothing: when one of them is broken, this one is not run.
    pub fn stands_on(&self) -> &'static [&'static str] {
        match (self.id, self.id.split_once('.').map_or("", |(group, _)| group)) {
            (load::FILE | load::MAPS, _) => &[],
            (data::ONE_PAGE, _) | (_, "load" | "open" | "calls") => &[load::MAPS],
            _ => &[load::MAPS, data::ONE_PAGE],
        }
    }

    const fn new(id: &'static str, section: &'static str, promise: &'static str, steps: &'static [Step]) -> Rule {
        Rule { id, promise, section, needs: &[], alone: false, killed: false, steps }
    }
    const fn needs(self, needs: &'static [Capability]) -> Rule {
        Rule { needs, ..self }
    }
    const fn alone(self) -> Rule {
        Rule { alone: true, ..self }
    }
    const fn killed(self) -> Rule {
        Rule { alone: true, killed: true, ..self }
    }
}

/// A part of a rule.
pub(crate) type Step = fn(&Bench) -> Check;

/// What helpers of rules answer: a value, or why the rule ends here.
pub(crate) type Check<T = ()> = std::result::Result<T, Stop>;

/// Why a rule ends.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A promise is broken: the one of the rule that runs, or of the one that the finding names.
    Fail(Finding),
    /// The rule says nothing about this instance.
    Skip(String),
}

/// A broken promise of the rule that runs.
pub(crate) fn fail<T>(expected: impl Into<String>, seen: impl Into<String>) -> Check<T> {
    Err(Stop::Fail(Finding { rule: None, expected: expected.into(), seen: seen.into() }))
}

/// A broken promise of another rule: one that every call has to keep. The rule that runs ends without a verdict.
pub(crate) fn fail_rule<T>(rule: &str, expected: impl Into<String>, seen: impl Into<String>) -> Check<T> {
    Err(Stop::Fail(Finding { rule: Some(rule.to_owned()), expected: expected.into(), seen: seen.into() }))
}

/// Fails unless `holds`.
pub(crate) fn ensure(holds: bool, expected: impl Into<String>, seen: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { fail(expected, seen()) }
}

/// Every rule, in the order in which they are run and shown.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    [
        load::RULES,
        open::RULES,
        calls::RULES,
        pools::RULES,
        data::RULES,
        threads::RULES,
        exists::RULES,
        remove::RULES,
        isolation::RULES,
        time::RULES,
        memory::RULES,
        life::RULES,
        status::RULES,
        linker::RULES,
    ]
    .into_iter()
    .flatten()
}

/// The rule of that name.
pub fn rule(id: &str) -> Option<&'static Rule> {
    rules().find(|rule| rule.id == id)
}
