//! `kvdock plugin check`: the conformance suite against a file, each rule in a process of its own.
//!
//! A crash, an `exit` or a hang is a finding of the rule that ran, and not the end. Exit codes: 0 every rule is kept, 1 one is broken, 2
//! none is broken, but the check or a rule of it could not be run.

mod child;
mod junit;
mod process;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use crossbeam_channel::unbounded;
use indicatif::{ProgressBar, ProgressStyle};
use kvdock_plugin_api::conformance::{Entry, Finding, Limits, MOST_HANGS, Report, Rule, Verdict, rules, run_in_order};
use serde_json::{Map, Value};

pub(super) use child::{StepArgs, step};

use super::interrupt::Interrupts;
use super::{Failure, print, say};
use crate::config::{Sources, expanded_in};
use crate::plugin::{PluginInfo, Reason, find, inspect, schema, search_path};
use process::Plugin;

/// The rule that the file itself is about: it is looked at here, before any of its code runs.
const FILE: &str = "load.file";
/// The rule that says whether the library can be mapped.
const MAPS: &str = "load.maps";

/// No rule: whether there is anything to check.
const READY: &str = "ready";
/// Stands for a fresh folder in a configuration.
const SCRATCH: &str = "{scratch}";

/// What `kvdock plugin check` takes.
#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// The plugin: the path of its file, or its name in the search path.
    #[arg(value_name = "PATH", required_unless_present = "list")]
    plugin: Option<String>,
    /// The plugin's configuration, a JSON object; `{scratch}` stands for a fresh folder, one for each rule. Without it that of the plugin's note.
    /// Keys to which the note gives a `{scratch}`, and those that its schema names for this (`x-check-apart`), come from there when they are left
    /// out: rules run beside one another and must not meet.
    #[arg(long, value_name = "JSON")]
    config: Option<String>,
    /// Also write the result as JUnit XML.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Run only this rule, or the rules whose names begin so; may be given often.
    #[arg(long, value_name = "RULE")]
    rule: Vec<String>,
    /// Times all limits of time by this, for a store that is slow to answer.
    #[arg(long, value_name = "FACTOR", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    patience: u32,
    /// Set a config key, such as storage.plugin_path=["target/release"], by which a name is looked up; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// List the rules, and run none.
    #[arg(long)]
    list: bool,
}

/// Runs the check.
pub(super) fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    match run(args) {
        Ok(code) => Ok(code),
        Err(Failure(text)) => {
            text.lines().for_each(|line| say(&format!("error: {line}")));
            Ok(ExitCode::from(2))
        }
    }
}

fn run(args: &CheckArgs) -> Result<ExitCode, Failure> {
    if args.list {
        return list();
    }
    let asked = chosen(&args.rule)?;
    let Some(plugin) = args.plugin.as_deref() else {
        return Err(Failure("expected the path of a plugin".to_owned()));
    };
    // Made first: whether it can be is not to be learned when all rules have run. No report of an earlier check stays there.
    let junit = args
        .junit
        .as_deref()
        .map(|file| File::create(file).map(|made| (file, made)).map_err(|error| of_junit(file, &error)));
    let junit = junit.transpose()?;
    let path = locate(plugin, &args.set)?;
    let began = Instant::now();
    let (name, report) = match inspect(&path) {
        Ok(info) => {
            let (config, warnings) = config(&info, args.config.as_deref())?;
            let (name, plugin) = (info.note.name.clone(), Plugin::new(info, config, args.patience)?);
            let (bar, hangs) = (progress(asked.len()), AtomicUsize::new(0));
            let _interrupts = Interrupts::listen(process::interrupt)?;
            let unready = || plugin.unready(args.config.is_some());
            if let Some(why) = unready() {
                let why = as_configured(&why, &name);
                return Err(Failure(format!("{name} can't be checked, for no instance can be opened: {why}")));
            }
            let report = run_in_order(&asked, |rules| run_rules(&plugin, rules, &hangs, &bar));
            bar.finish_and_clear();
            if !report.failed().is_empty()
                && let Some(why) = unready()
            {
                let why = as_configured(&why, &name);
                return Err(Failure(format!("{name} can't be checked, for its store went away meanwhile: {why}")));
            }
            if !report.failed().is_empty() {
                // Said at the beginning, and a cause that nobody thinks of at the end.
                warnings.iter().for_each(|line| say(line));
            }
            (name, report)
        }
        Err(refusal) if matches!(refusal.reason, Reason::Unreadable(_) | Reason::Unsafe { .. }) => {
            return Err(Failure::new(refusal));
        }
        Err(refusal) => (path.display().to_string(), Report::gather(refused(&asked, &refusal.reason.to_string()))),
    };
    if let Some((file, mut made)) = junit {
        let text = junit::write(&name, &report, began.elapsed());
        made.write_all(text.as_bytes()).map_err(|error| of_junit(file, &error))?;
    }
    if process::is_interrupted() {
        return Err(Failure("interrupted".to_owned()));
    }
    print(&words(&report))?;
    outcome(&report)
}

/// The words of a plugin with its keys as a configuration file has them: the host of the suite calls each instance "mock".
fn as_configured(why: &str, name: &str) -> String {
    why.replace("storage.mock", &format!("storage.{name}"))
}

/// The report in words. Of a file that the host refuses one line says all there is to say.
fn words(report: &Report) -> String {
    let refused = |entry: &&Entry| entry.rule.id == FILE && matches!(entry.verdict, Verdict::Failed(_));
    match report.entries.iter().find(refused) {
        Some(entry) => format!("{entry}\n{} other rules were not run\n", report.entries.len() - 1),
        None => format!("{report}\n"),
    }
}

fn of_junit(file: &Path, error: &std::io::Error) -> Failure {
    Failure(format!("--junit: {}: {error}", file.display()))
}

/// The exit code. A rule that is broken is the plugin's fault whatever else went wrong; without one, rules that could not be run leave it open.
fn outcome(report: &Report) -> Result<ExitCode, Failure> {
    let not_run = report.not_run();
    let why = not_run.first().map(|(rule, why)| {
        format!("{} of {} rules could not be run, the first of them {rule}: {why}", not_run.len(), report.entries.len())
    });
    match (report.failed().is_empty(), why) {
        (true, None) => Ok(ExitCode::SUCCESS),
        (true, Some(why)) => Err(Failure(why)),
        (false, why) => {
            why.into_iter().for_each(|why| say(&format!("error: {why}")));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn list() -> Result<ExitCode, Failure> {
    let width = rules().map(|rule| rule.id.len()).max().unwrap_or_default();
    let line = |rule: &Rule| format!("{:width$}  {} (ABI.md {})\n", rule.id, rule.promise, rule.section);
    print(&rules().map(line).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// The rules that are asked for.
fn chosen(ids: &[String]) -> Result<Vec<&'static Rule>, Failure> {
    if ids.iter().any(String::is_empty) {
        return Err(Failure(
            "--rule: expected the name of a rule or its beginning, found nothing; --list shows them".to_owned(),
        ));
    }
    if let Some(unknown) = ids.iter().find(|id| !rules().any(|rule| rule.id.starts_with(id.as_str()))) {
        return Err(Failure(format!("no rule is named {unknown:?} or begins so; --list shows them")));
    }
    let asked = |rule: &&Rule| ids.is_empty() || ids.iter().any(|id| rule.id.starts_with(id.as_str()));
    Ok(rules().filter(asked).collect())
}

/// The file: what is named, or what the search path has under the name.
pub(super) fn locate(plugin: &str, set: &[String]) -> Result<PathBuf, Failure> {
    if plugin.contains('/') || plugin.ends_with(".so") || Path::new(plugin).exists() {
        let path = Path::new(plugin);
        return path.canonicalize().map_err(|error| Failure(format!("{plugin}: {error}")));
    }
    let config = crate::config::load(&Sources::from_process(None, set.to_vec())).map_err(Failure::new)?.config;
    let info = find(plugin, &search_path(&config.storage.plugin_path)).map_err(Failure::new)?;
    say(&format!("{plugin} is {}", info.path.display()));
    Ok(info.path)
}

/// The configuration: what was given, which has to fit the schema, or that of the note. With it why rules may meet all the same.
fn config(info: &PluginInfo, given: Option<&str>) -> Result<(Value, Vec<String>), Failure> {
    let note = &info.note;
    let Some(text) = given else { return Ok((note.check_config.clone(), Vec::new())) };
    let value: Value = serde_json::from_str(text).map_err(|error| Failure(format!("--config is no JSON: {error}")))?;
    let Value::Object(keys) = value else {
        return Err(Failure(format!("--config: expected a JSON object, found {text}")));
    };
    let keys = expanded_in("--config", &note.config_schema, &keys).map_err(Failure)?;
    let (keys, said, warnings) = kept_apart(keys, &note.check_config, &note.config_schema);
    said.iter().chain(&warnings).for_each(|line| say(line));
    let value = Value::Object(keys);
    // As the rules fill it in.
    let filled = fill(value.clone(), "/tmp/kvdock-check");
    schema::validate(&note.name, &note.config_schema, filled.as_object().unwrap_or(&Map::new()))
        .map_err(|error| Failure(format!("--config: {error}")))?;
    Ok((value, warnings))
}

/// A configuration with what keeps rules apart that run beside one another, as the note has it: values with a scratch folder in its configuration
/// for checks, and those that its schema names. With it what was added, and what keeps nobody apart.
fn kept_apart(
    mut keys: Map<String, Value>,
    check_config: &Value,
    schema: &Value,
) -> (Map<String, Value>, Vec<String>, Vec<String>) {
    let (mut said, mut warnings) = (Vec::new(), Vec::new());
    let members = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut declared = members(check_config);
    declared.retain(|_, value| value.to_string().contains(SCRATCH));
    declared.extend(members(schema.get("x-check-apart").unwrap_or(&Value::Null)));
    for (key, value) in declared {
        let is_folder = value.to_string().contains(SCRATCH);
        match keys.get(&key) {
            None => {
                said.push(format!("--config has no {key}: it is {value}, as the plugin declares it for checks, so that rules do not meet"));
                keys.insert(key, value);
            }
            Some(given) if is_folder && given.to_string().contains(SCRATCH) || *given == value => {}
            Some(given) => warnings.push(format!(
                "warning: {key} is {given}: rules that run beside one another meet in the store then, and may fail by no fault of the plugin; \
                 {value} keeps them apart"
            )),
        }
    }
    (keys, said, warnings)
}

/// A configuration with a folder in place of `{scratch}`.
fn fill(value: Value, folder: &str) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace(SCRATCH, folder)),
        Value::Array(values) => values.into_iter().map(|value| fill(value, folder)).collect(),
        Value::Object(map) => map.into_iter().map(|(key, value)| (key, fill(value, folder))).collect(),
        other => other,
    }
}

fn entry(rule: &'static Rule, verdict: Verdict) -> Entry {
    Entry { rule, verdict, took: Duration::ZERO }
}

/// The report of a file that no host loads.
fn refused(asked: &[&'static Rule], reason: &str) -> Vec<Entry> {
    let finding =
        Finding { rule: None, expected: "a file that this host may load".to_owned(), seen: reason.to_owned() };
    let verdict = |rule: &Rule| match rule.id {
        FILE => Verdict::Failed(vec![finding.clone()]),
        _ => Verdict::Skipped("not run: the host refuses the file".to_owned()),
    };
    let mut entries: Vec<Entry> = asked.iter().map(|rule| entry(rule, verdict(rule))).collect();
    if !entries.iter().any(|entry| entry.rule.id == FILE) {
        entries.extend(rules().find(|rule| rule.id == FILE).map(|rule| entry(rule, verdict(rule))));
    }
    entries
}

/// Runs rules, a few at a time. `hangs` counts those that waited for a call that did not return.
fn run_rules(plugin: &Plugin, asked: &[&'static Rule], hangs: &AtomicUsize, bar: &ProgressBar) -> Vec<Entry> {
    let (todo, queue) = unbounded();
    let (done, ended) = unbounded();
    for (place, rule) in asked.iter().enumerate() {
        let _ = todo.send((place, *rule));
    }
    drop(todo);
    let mut entries: Vec<Option<Entry>> = vec![None; asked.len()];
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |count| count.get().min(4)) {
            let (queue, done) = (queue.clone(), done.clone());
            scope.spawn(move || {
                for (place, rule) in queue {
                    bar.set_message(rule.id);
                    let entry = match rule.id {
                        FILE => entry(rule, Verdict::Passed),
                        _ if hangs.load(Ordering::Relaxed) >= MOST_HANGS => entry(rule, Verdict::not_run_after_hangs()),
                        _ => plugin.run(rule),
                    };
                    hangs.fetch_add(usize::from(entry.verdict.is_hang(rule)), Ordering::Relaxed);
                    let _ = done.send((place, entry));
                }
            });
        }
        drop(done);
        for (place, entry) in ended {
            bar.inc(1);
            entries[place] = Some(entry);
        }
    });
    entries.into_iter().flatten().collect()
}

/// A bar on a terminal, nothing elsewhere.
fn progress(rules: usize) -> ProgressBar {
    let bar = ProgressBar::new(rules as u64);
    if let Ok(style) = ProgressStyle::with_template("{pos}/{len} rules {bar:40} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Limits of time of a check.
fn limits(patience: u32) -> Limits {
    Limits::default().times(patience)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_chosen_by_name_or_beginning() {
        assert!(chosen(&[]).unwrap().len() > 20);
        let loads = chosen(&["load.".to_owned()]).unwrap();
        assert!(loads.len() > 2 && loads.iter().all(|rule| rule.id.starts_with("load.")));
        assert_eq!(chosen(&["data.one_page".to_owned()]).unwrap().len(), 1);
        assert!(chosen(&["date.".to_owned()]).unwrap_err().0.contains("date."));
    }

    #[test]
    fn a_hundred_skipped_rules_hid_why_the_file_is_refused() {
        let asked = chosen(&[]).unwrap();
        let text = words(&Report::gather(refused(&asked, "it is a text")));
        assert!(text.starts_with("FAILED") && text.contains("it is a text"), "{text}");
        assert!(text.ends_with(&format!("{} other rules were not run\n", asked.len() - 1)), "{text}");
        assert!(!text.contains("skipped"), "{text}");
    }

    #[test]
    fn the_key_of_a_configuration_was_shown_as_that_of_a_mock() {
        assert_eq!(as_configured("storage.mock.dir: no folder", "file"), "storage.file.dir: no folder");
        assert_eq!(as_configured("storage.mock: unreachable", "umbp"), "storage.umbp: unreachable");
    }

    #[test]
    fn an_empty_rule_chose_all_of_them() {
        assert!(chosen(&[String::new()]).unwrap_err().0.starts_with("--rule: expected the name of a rule"));
        assert!(chosen(&["data.one_page".to_owned(), String::new()]).is_err());
    }

    #[test]
    fn a_configuration_of_ones_own_lost_what_keeps_rules_apart() {
        let note = serde_json::json!({"dir": "{scratch}/pages", "size": 3, "tag": ["{scratch}"]});
        let given = serde_json::json!({"size": 4, "tag": "mine"});
        let (keys, said, warnings) = kept_apart(given.as_object().unwrap().clone(), &note, &Value::Null);
        assert_eq!(
            Value::Object(keys.clone()),
            serde_json::json!({"size": 4, "tag": "mine", "dir": "{scratch}/pages"})
        );
        assert!(matches!(&said[..], [dir] if dir.contains("no dir")), "{said:?}");
        assert!(matches!(&warnings[..], [tag] if tag.contains("tag is")), "{warnings:?}");
        let (_, said, warnings) = kept_apart(note.as_object().unwrap().clone(), &note, &Value::Null);
        assert!(said.is_empty() && warnings.is_empty(), "{said:?} {warnings:?}");
        assert_eq!(fill(Value::Object(keys), "/x")["dir"], "/x/pages");
    }

    #[test]
    fn without_a_key_of_the_plugin_rules_stored_pages_with_one_another_and_lost_them() {
        let schema = serde_json::json!({"x-check-apart": {"prefer_own": true}});
        let apart = |given: Value| kept_apart(given.as_object().unwrap().clone(), &Value::Null, &schema);
        let (keys, said, warnings) = apart(serde_json::json!({"size": 4}));
        assert_eq!(Value::Object(keys), serde_json::json!({"size": 4, "prefer_own": true}));
        assert!(said[0].contains("no prefer_own") && warnings.is_empty(), "{said:?} {warnings:?}");
        let (keys, said, warnings) = apart(serde_json::json!({"prefer_own": false}));
        assert_eq!(Value::Object(keys), serde_json::json!({"prefer_own": false}));
        assert!(said.is_empty() && warnings[0].contains("true keeps them apart"), "{said:?} {warnings:?}");
        let (_, said, warnings) = apart(serde_json::json!({"prefer_own": true}));
        assert!(said.is_empty() && warnings.is_empty(), "{said:?} {warnings:?}");
    }

    #[test]
    fn rules_that_could_not_be_run_are_no_success() {
        let report = |verdicts: Vec<Verdict>| Report {
            entries: rules().zip(verdicts).map(|(rule, verdict)| entry(rule, verdict)).collect(),
        };
        let not_run = || Verdict::NotRun("no folder".to_owned());
        let broken = || Verdict::Failed(vec![Finding { rule: None, expected: "a".into(), seen: "b".into() }]);
        assert_eq!(outcome(&report(vec![Verdict::Passed])).ok(), Some(ExitCode::SUCCESS));
        let why = outcome(&report(vec![Verdict::Passed, not_run()])).unwrap_err().0;
        assert!(why.starts_with("1 of 2 rules could not be run") && why.ends_with("load.maps: no folder"), "{why}");
        assert_eq!(outcome(&report(vec![broken(), not_run()])).ok(), Some(ExitCode::FAILURE));
    }
}
