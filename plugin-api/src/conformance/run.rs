//! Runs rules.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::bench::Bench;
use super::calls::{HANG, Watch};
use super::report::{Entry, Finding, MOST_HANGS, Report, Verdict};
use super::{Declared, Rule, Stop, rules};
use crate::raw::panic_message;
use crate::v0_1::EntryFn;

/// How much time things may take. They are there to end a plugin that hangs, not to measure one.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time that a call has when a rule says nothing else.
    pub call: Duration,
    /// How long after its deadline a call may return.
    pub late: Duration,
    /// How long after its deadline a call counts as one that never returns.
    pub hang: Duration,
    /// How long a step of a rule may take.
    pub step: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            call: Duration::from_secs(30),
            late: Duration::from_secs(5),
            hang: Duration::from_secs(10),
            step: Duration::from_secs(120),
        }
    }
}

impl Limits {
    /// The same with all times multiplied.
    pub fn times(self, factor: u32) -> Limits {
        let Limits { call, late, hang, step } = self;
        Limits { call: call * factor, late: late * factor, hang: hang * factor, step: step * factor }
    }
}

/// The plugin that is looked at.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its entry function.
    pub entry: EntryFn,
    /// What its note says.
    pub declared: Declared,
    /// The configuration that instances are opened with; `{scratch}` stands for a fresh folder.
    pub config: Value,
}

/// Runs rules against an entry function in this process.
#[derive(Debug, Clone)]
pub struct Suite {
    subject: Subject,
    limits: Limits,
    only: Vec<String>,
    alone: bool,
}

impl Suite {
    /// All rules, with the configuration of the note.
    pub fn new(entry: EntryFn, declared: impl Into<Declared>) -> Suite {
        let declared = declared.into();
        let config = declared.check_config.clone();
        Suite {
            subject: Subject { entry, declared, config },
            limits: Limits::default(),
            only: Vec::new(),
            alone: false,
        }
    }
    /// Another configuration than that of the note.
    pub fn config(mut self, config: Value) -> Suite {
        self.subject.config = config;
        self
    }
    /// Only rules whose name is `id`, or begins with it; may be said more than once.
    pub fn only(mut self, id: &str) -> Suite {
        self.only.push(id.to_owned());
        self
    }
    /// Other limits of time.
    pub fn limits(mut self, limits: Limits) -> Suite {
        self.limits = limits;
        self
    }
    /// Says that nothing else runs in this process, so that rules about threads, files and the state of the process can be run too.
    pub fn alone(mut self) -> Suite {
        self.alone = true;
        self
    }

    /// Runs the rules.
    pub fn run(&self) -> Report {
        let asked = |rule: &&Rule| self.only.is_empty() || self.only.iter().any(|id| rule.id.starts_with(id.as_str()));
        let asked: Vec<&'static Rule> = rules().filter(asked).collect();
        let mut hangs = 0;
        run_in_order(&asked, |batch| {
            let run = |rule: &&'static Rule| {
                if hangs >= MOST_HANGS {
                    return Entry { rule, verdict: Verdict::not_run_after_hangs(), took: Duration::ZERO };
                }
                let entry = self.run_rule(rule);
                hangs += usize::from(entry.verdict.is_hang(rule));
                entry
            };
            batch.iter().map(run).collect()
        })
    }

    fn run_rule(&self, rule: &'static Rule) -> Entry {
        let began = Instant::now();
        let verdict = if rule.killed || rule.alone && !self.alone {
            Verdict::Skipped("it needs a process of its own, as kvdock plugin check gives it".to_owned())
        } else {
            self.run_steps(rule)
        };
        Entry { rule, verdict, took: began.elapsed() }
    }

    fn run_steps(&self, rule: &'static Rule) -> Verdict {
        let scratch = match tempfile::tempdir() {
            Ok(scratch) => scratch,
            Err(error) => return Verdict::NotRun(format!("there is no scratch folder: {error}")),
        };
        for step in 0..rule.steps.len() {
            match run_step(&self.subject, rule, step, scratch.path(), self.limits) {
                Verdict::Passed => {}
                other => return other,
            }
        }
        Verdict::Passed
    }
}

/// Runs the rules that are asked for, first those that others stand on. `run` answers for a batch of rules, in any order. When a rule that
/// others stand on is broken, those are not run, and the report shows it also when it was not asked for.
pub fn run_in_order(asked: &[&'static Rule], mut run: impl FnMut(&[&'static Rule]) -> Vec<Entry>) -> Report {
    let mut entries: Vec<Entry> = Vec::new();
    let broken_below = |rule: &Rule, entries: &[Entry]| {
        let broken = |id: &&&str| entries.iter().any(|entry| entry.rule.id == **id && entry.verdict != Verdict::Passed);
        rule.stands_on().iter().find(broken).copied()
    };
    let not_run = |rule: &'static Rule, below: &str, entries: &[Entry]| {
        let unknown = |entry: &Entry| entry.rule.id == below && matches!(entry.verdict, Verdict::NotRun(_));
        let verdict = match entries.iter().any(unknown) {
            true => Verdict::NotRun(format!("it stands on {below}, which could not be run")),
            false => Verdict::Skipped(format!("not run: {below} is not kept")),
        };
        Entry { rule, verdict, took: Duration::ZERO }
    };
    let first: Vec<&'static Rule> =
        rules().filter(|rule| asked.iter().any(|asked| asked.stands_on().contains(&rule.id))).collect();
    for rule in &first {
        match broken_below(rule, &entries) {
            Some(below) => {
                let entry = not_run(rule, below, &entries);
                entries.push(entry);
            }
            None => entries.extend(run(&[rule])),
        }
    }
    let others = asked.iter().filter(|rule| !first.iter().any(|done| done.id == rule.id));
    let mut free: Vec<&'static Rule> = Vec::new();
    for rule in others {
        match broken_below(rule, &entries) {
            Some(below) => {
                let entry = not_run(rule, below, &entries);
                entries.push(entry);
            }
            None => free.push(rule),
        }
    }
    entries.extend(run(&free));
    let is_asked = |entry: &Entry| asked.iter().any(|rule| rule.id == entry.rule.id);
    entries.retain(|entry| is_asked(entry) || matches!(entry.verdict, Verdict::Failed(_) | Verdict::NotRun(_)));
    Report::gather(entries)
}

/// Runs one step of a rule in this process, with a scratch folder that the steps of the rule share. A call that does not return is a
/// finding; its thread stays behind.
pub fn run_step(subject: &Subject, rule: &'static Rule, step: usize, scratch: &Path, limits: Limits) -> Verdict {
    let declared = subject.declared.capabilities.raw().flags;
    if let Some(missing) = rule.needs.iter().find(|needed| declared & needed.raw() == 0) {
        return Verdict::Skipped(format!("its note does not declare the capability {missing}"));
    }
    let Some(run) = rule.steps.get(step).copied() else {
        return Verdict::Skipped(format!("it has no step {step}"));
    };
    let watch = Arc::new(Watch::new(limits));
    let bench = Bench::new(subject, rule, scratch, watch.clone());
    let (done, ended) = mpsc::channel();
    let body = move || {
        let result = catch_unwind(AssertUnwindSafe(|| run(&bench)));
        // Nobody listens any more when the step took too long.
        let _ = done.send(result);
    };
    let thread = match std::thread::Builder::new().name("conformance".to_owned()).spawn(body) {
        Ok(thread) => thread,
        Err(error) => return Verdict::NotRun(format!("there is no thread for it: {error}")),
    };
    let began = Instant::now();
    loop {
        match ended.recv_timeout(Duration::from_millis(50)) {
            Ok(result) => {
                let _ = thread.join();
                return verdict(result);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return failed(None, "the rule ends", "its thread ended without a word");
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some((call, late)) = watch.hung() {
            return failed(
                Some(HANG),
                format!("{call} returns"),
                format!("it has not returned {late:.0?} after its deadline"),
            );
        }
        if began.elapsed() > limits.step {
            return failed(None, "the rule ends", format!("it did not end within {:?}", limits.step));
        }
    }
}

fn verdict(result: std::thread::Result<super::Check>) -> Verdict {
    match result {
        Ok(Ok(())) => Verdict::Passed,
        Ok(Err(Stop::Skip(why))) => Verdict::Skipped(why),
        Ok(Err(Stop::Fail(finding))) => Verdict::Failed(vec![finding]),
        Err(payload) => failed(None, "the rule ends", format!("the suite stopped: {}", panic_message(&*payload))),
    }
}

fn failed(rule: Option<&str>, expected: impl Into<String>, seen: impl Into<String>) -> Verdict {
    let rule = rule.map(str::to_owned);
    Verdict::Failed(vec![Finding { rule, expected: expected.into(), seen: seen.into() }])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(asked: &str, broken: &str) -> Report {
        let asked: Vec<&'static Rule> = rules().filter(|rule| rule.id.starts_with(asked)).collect();
        let verdict = |rule: &Rule| match rule.id == broken {
            true => failed(None, "a", "b"),
            false => Verdict::Passed,
        };
        let entry = |rule: &&'static Rule| Entry { rule, verdict: verdict(rule), took: Duration::ZERO };
        run_in_order(&asked, |batch| batch.iter().map(entry).collect())
    }

    #[test]
    fn rules_that_stand_on_a_broken_one_are_not_run() {
        let all = report("", "data.one_page");
        assert_eq!(all.failed(), ["data.one_page"]);
        let (passed, _, skipped) = all.counts();
        assert!(passed > 10 && skipped > 50, "{all}");
        assert_eq!(all.entries.len(), rules().count());
        // Shown though it was not asked for, and in its place.
        let some = report("isolation.", "data.one_page");
        assert_eq!((some.failed(), some.entries[0].rule.id), (vec!["data.one_page"], "data.one_page"));
        assert_eq!(some.counts().0, 0);
        assert!(report("isolation.", "data.chain").failed().is_empty());
        assert_eq!(report("load.", "data.one_page").counts().1, 0);
    }
}
