//! The report as JUnit XML, for machines that show test results.

use std::io;
use std::time::Duration;

use kvdock_plugin_api::conformance::{Entry, Report, Verdict};
use quick_xml::Writer;
use quick_xml::events::BytesText;

/// The XML text: a test suite with a test case for each rule.
pub(super) fn write(plugin: &str, report: &Report, took: Duration) -> String {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    // Writing to memory can't fail.
    let _ = suite(&mut writer, plugin, report, took);
    let body = String::from_utf8_lossy(&writer.into_inner()).into_owned();
    format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{body}\n")
}

type Xml = Writer<Vec<u8>>;

fn suite(xml: &mut Xml, plugin: &str, report: &Report, took: Duration) -> io::Result<()> {
    let (_, failed, skipped) = report.counts();
    let name = format!("kvdock plugin check {plugin}");
    let counts = [
        ("tests", report.entries.len().to_string()),
        ("failures", failed.to_string()),
        ("errors", report.not_run().len().to_string()),
        ("skipped", skipped.to_string()),
        ("time", seconds(took)),
    ];
    let counts: Vec<(&str, &str)> = counts.iter().map(|(key, value)| (*key, value.as_str())).collect();
    xml.create_element("testsuites").with_attributes(counts.iter().copied()).write_inner_content(|xml| {
        xml.create_element("testsuite")
            .with_attribute(("name", clean(&name).as_str()))
            .with_attributes(counts.iter().copied())
            .write_inner_content(|xml| report.entries.iter().try_for_each(|entry| case(xml, entry)))?;
        Ok(())
    })?;
    Ok(())
}

fn case(xml: &mut Xml, entry: &Entry) -> io::Result<()> {
    let group = entry.rule.id.split('.').next().unwrap_or_default();
    let time = seconds(entry.took);
    let case = xml.create_element("testcase").with_attributes([
        ("classname", format!("kvdock.{group}").as_str()),
        ("name", entry.rule.id),
        ("time", time.as_str()),
    ]);
    match &entry.verdict {
        Verdict::Passed => case.write_empty()?,
        Verdict::Skipped(why) => case.write_inner_content(|xml| {
            xml.create_element("skipped").with_attribute(("message", clean(why).as_str())).write_empty()?;
            Ok(())
        })?,
        Verdict::NotRun(why) => case.write_inner_content(|xml| {
            xml.create_element("error")
                .with_attributes([("message", clean(why).as_str()), ("type", "not run")])
                .write_empty()?;
            Ok(())
        })?,
        Verdict::Failed(findings) => case.write_inner_content(|xml| {
            for finding in findings {
                let text = format!(
                    "{}\nABI.md {}\nexpected {}\nseen {}",
                    entry.rule.promise, entry.rule.section, finding.expected, finding.seen
                );
                let message = format!("expected {}, seen {}", finding.expected, finding.seen);
                xml.create_element("failure")
                    .with_attributes([("message", clean(&message).as_str()), ("type", entry.rule.id)])
                    .write_text_content(BytesText::new(&clean(&text)))?;
            }
            Ok(())
        })?,
    };
    Ok(())
}

fn seconds(time: Duration) -> String {
    format!("{:.3}", time.as_secs_f64())
}

/// The text without characters that XML can't carry: messages of a plugin may have any.
fn clean(text: &str) -> String {
    let carried =
        |c: char| matches!(c, '\t' | '\n' | '\r' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..);
    text.chars().map(|c| if carried(c) { c } else { '\u{fffd}' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvdock_plugin_api::conformance::{Finding, rules};
    use quick_xml::Reader;
    use quick_xml::events::Event;

    #[test]
    fn any_text_gives_xml_that_parses() {
        let verdicts = [
            Verdict::Passed,
            Verdict::Skipped("\"a\" & <b>".to_owned()),
            Verdict::NotRun("no \"folder\"".to_owned()),
            Verdict::Failed(vec![Finding { rule: None, expected: "]]>".into(), seen: "\u{0}\u{1b}[31m é".into() }]),
        ];
        let entries =
            rules().zip(verdicts).map(|(rule, verdict)| Entry { rule, verdict, took: Duration::from_millis(1500) });
        let text = write("a&b", &Report { entries: entries.collect() }, Duration::from_secs(2));
        let mut reader = Reader::from_str(&text);
        let (mut cases, mut failures, mut skipped, mut errors) = (0, 0, 0, 0);
        loop {
            match reader.read_event().unwrap() {
                Event::Start(tag) | Event::Empty(tag) => {
                    tag.attributes().for_each(|attribute| assert!(attribute.is_ok()));
                    match tag.name().as_ref() {
                        "testcase" => cases += 1,
                        "failure" => failures += 1,
                        "skipped" => skipped += 1,
                        "error" => errors += 1,
                        _ => {}
                    }
                }
                Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!((cases, failures, skipped, errors), (4, 1, 1, 1));
        assert!(
            text.contains(r#"time="1.500""#)
                && text.contains(r#"tests="4""#)
                && text.contains(r#"errors="1""#)
                && !text.contains('\u{1b}'),
            "{text}"
        );
    }
}
