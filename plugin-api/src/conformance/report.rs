//! What the suite found.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Rule;
use super::calls::HANG;

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The rule whose promise it is; none for the rule that ran.
    #[serde(default)]
    pub rule: Option<String>,
    /// What would be right.
    pub expected: String,
    /// What was seen instead.
    pub seen: String,
}

/// What became of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The promise is kept.
    Passed,
    /// The promise is broken.
    Failed(Vec<Finding>),
    /// The rule says nothing about this plugin, and why.
    Skipped(String),
    /// The rule could not be run, and why: nothing is known about it. The plugin has no part in it.
    NotRun(String),
}

impl Verdict {
    /// Whether a call did not return, of this rule or of any other.
    pub fn is_hang(&self, rule: &Rule) -> bool {
        let hang = |finding: &Finding| finding.rule.as_deref().unwrap_or(rule.id) == HANG;
        matches!(self, Verdict::Failed(findings) if findings.iter().any(hang))
    }

    /// What the rules get that are not run, because calls have hung too often.
    pub fn not_run_after_hangs() -> Verdict {
        Verdict::Skipped(format!("not run: {HANG} is broken, and {MOST_HANGS} rules have waited for it"))
    }
}

/// After so many rules that ended in a call that did not return, the others are not run: each would wait as long.
pub const MOST_HANGS: usize = 3;

/// One line of a report.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The rule.
    pub rule: &'static Rule,
    /// What became of it.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// What became of each rule.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// A line a rule, in the order of the rules.
    pub entries: Vec<Entry>,
}

impl Report {
    /// Gathers what rules found while they ran. A finding that belongs to another rule counts there, and leaves the one that ran without a
    /// verdict of its own.
    pub fn gather(ran: Vec<Entry>) -> Report {
        let mut report = Report::default();
        let mut elsewhere: Vec<(Finding, &'static str)> = Vec::new();
        for mut entry in ran {
            if let Verdict::Failed(findings) = &mut entry.verdict {
                let own = entry.rule.id;
                let is_foreign = |finding: &Finding| finding.rule.as_deref().is_some_and(|id| id != own);
                let (foreign, kept): (Vec<_>, Vec<_>) = std::mem::take(findings).into_iter().partition(is_foreign);
                *findings = kept;
                if findings.is_empty() {
                    let by = foreign.first().and_then(|finding| finding.rule.clone()).unwrap_or_default();
                    entry.verdict = Verdict::Skipped(format!("ended early: {by} is broken"));
                }
                elsewhere.extend(foreign.into_iter().map(|finding| (finding, own)));
            }
            report.entries.push(entry);
        }
        for (finding, found_by) in elsewhere {
            report.add(finding, found_by);
        }
        let place = |entry: &Entry| super::rules().position(|rule| rule.id == entry.rule.id);
        report.entries.sort_by_key(place);
        report
    }

    fn add(&mut self, finding: Finding, found_by: &'static str) {
        let Some(rule) = finding.rule.as_deref().and_then(super::rule) else { return };
        let finding = Finding { rule: None, seen: format!("{} (while {found_by} ran)", finding.seen), ..finding };
        let place = self.entries.iter().position(|entry| entry.rule.id == rule.id);
        let Some(entry) = place.and_then(|place| self.entries.get_mut(place)) else {
            // Not asked for, but broken all the same.
            let verdict = Verdict::Failed(vec![finding]);
            return self.entries.push(Entry { rule, verdict, took: Duration::ZERO });
        };
        match &mut entry.verdict {
            Verdict::Failed(findings) if findings.len() < 3 => findings.push(finding),
            Verdict::Failed(_) => {}
            other => *other = Verdict::Failed(vec![finding]),
        }
    }

    /// The rules that could not be run, and why.
    pub fn not_run(&self) -> Vec<(&'static str, &str)> {
        let whys = self.entries.iter().filter_map(|entry| match &entry.verdict {
            Verdict::NotRun(why) => Some((entry.rule.id, why.as_str())),
            _ => None,
        });
        whys.collect()
    }

    /// The rules that are broken.
    pub fn failed(&self) -> Vec<&'static str> {
        let failed = |entry: &&Entry| matches!(entry.verdict, Verdict::Failed(_));
        self.entries.iter().filter(failed).map(|entry| entry.rule.id).collect()
    }

    /// Number of rules that are kept, broken, and skipped.
    pub fn counts(&self) -> (usize, usize, usize) {
        self.entries.iter().fold((0, 0, 0), |(passed, failed, skipped), entry| match entry.verdict {
            Verdict::Passed => (passed + 1, failed, skipped),
            Verdict::Failed(_) => (passed, failed + 1, skipped),
            Verdict::Skipped(_) => (passed, failed, skipped + 1),
            Verdict::NotRun(_) => (passed, failed, skipped),
        })
    }

    /// Ends the test when a rule is broken or could not be run.
    ///
    /// # Panics
    /// With every broken rule, what was expected and what was seen, or why rules could not be run.
    #[allow(clippy::panic, reason = "it is for tests, and says so")]
    pub fn assert_passed(&self) {
        if !self.failed().is_empty() {
            panic!("the plugin breaks the contract\n{self}");
        }
        if !self.not_run().is_empty() {
            panic!("rules could not be run\n{self}");
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.rule.id;
        match &self.verdict {
            Verdict::Passed => write!(f, "ok      {id}"),
            Verdict::Skipped(why) => write!(f, "skipped {id}: {why}"),
            Verdict::NotRun(why) => write!(f, "error   {id}: could not be run: {why}"),
            Verdict::Failed(findings) => {
                write!(f, "FAILED  {id}: {} (ABI.md {})", self.rule.promise, self.rule.section)?;
                findings.iter().try_for_each(|finding| write!(f, "\n{finding}"))
            }
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "          expected {}\n          seen     {}", self.expected, self.seen)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries.iter().try_for_each(|entry| writeln!(f, "{entry}"))?;
        let (passed, failed, skipped) = self.counts();
        // Beside a broken rule those that stand on it are skipped too.
        let why = if failed == 0 { "do not apply here" } else { "do not apply here or were not run" };
        write!(f, "{passed} rules kept, {failed} broken, {skipped} {why}")?;
        match self.not_run().len() {
            0 => Ok(()),
            count => write!(f, ", {count} could not be run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules;
    use super::*;

    #[test]
    fn a_finding_of_another_rule_counts_there() {
        let mut all = rules();
        let (first, second) = (all.next().unwrap(), all.next().unwrap());
        let finding = Finding { rule: Some(second.id.into()), expected: "a".into(), seen: "b".into() };
        let entry = |rule, verdict| Entry { rule, verdict, took: Duration::ZERO };
        let ran = vec![entry(first, Verdict::Failed(vec![finding.clone()])), entry(second, Verdict::Passed)];
        let report = Report::gather(ran);
        assert_eq!(report.failed(), [second.id]);
        assert_eq!(report.counts(), (0, 1, 1));
        // Also when that rule was not asked for.
        let report = Report::gather(vec![entry(first, Verdict::Failed(vec![finding]))]);
        assert_eq!(report.failed(), [second.id]);
    }

    #[test]
    fn a_rule_that_could_not_be_run_was_counted_as_one_that_says_nothing() {
        let entry = |rule, verdict| Entry { rule, verdict, took: Duration::ZERO };
        let verdicts = [Verdict::NotRun("no folder".to_owned()), Verdict::Passed];
        let report = Report::gather(rules().zip(verdicts).map(|(rule, verdict)| entry(rule, verdict)).collect());
        assert_eq!(report.counts(), (1, 0, 0));
        assert_eq!(report.not_run(), [(rules().next().unwrap().id, "no folder")]);
        let text = report.to_string();
        assert!(
            text.starts_with("error   load.file: could not be run: no folder\n")
                && text.ends_with(", 1 could not be run"),
            "{text}"
        );
        std::panic::catch_unwind(|| report.assert_passed()).unwrap_err();
    }
}
