//! The text of `/metrics`, as far as the tests read it.

use std::collections::{BTreeMap, BTreeSet};

/// Values by name and labels.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    values: Vec<(String, BTreeMap<String, String>, f64)>,
}

impl Metrics {
    /// Reads the text format.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self {
            values: lines
                .map(|line| parse_line(line).unwrap_or_else(|| panic!("not a line of metrics: {line:?}")))
                .collect(),
        }
    }

    /// The sum of all values of `name` whose labels are among others those given; 0 if there are none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let matches = |found: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| found.get(*key).is_some_and(|found| found == value))
        };
        self.values.iter().filter(|(found, with, _)| found == name && matches(with)).map(|(_, _, value)| value).sum()
    }

    /// Every series, as `name{label="value",...}` with the labels in order.
    pub fn series(&self) -> Vec<String> {
        let show = |(name, labels, _): &(String, BTreeMap<String, String>, f64)| {
            let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
            format!("{name}{{{}}}", labels.join(","))
        };
        self.values.iter().map(show).collect()
    }

    /// Series that stand there more than once.
    pub fn doubled(&self) -> Vec<String> {
        let mut seen = BTreeSet::new();
        self.series().into_iter().filter(|series| !seen.insert(series.clone())).collect()
    }

    /// Whether there is a value of this name.
    pub fn has(&self, name: &str) -> bool {
        self.values.iter().any(|(found, _, _)| found == name)
    }

    /// Pages of storage calls, by call and result.
    pub fn storage_pages(&self, op: &str, result: &str) -> f64 {
        self.sum("kvdock:storage_pages_total", &[("op", op), ("result", result)])
    }
}

fn parse_line(line: &str) -> Option<(String, BTreeMap<String, String>, f64)> {
    let (head, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, labels)) = head.split_once('{') else {
        return Some((head.to_owned(), BTreeMap::new(), value));
    };
    let pairs = labels.strip_suffix('}')?.split("\",").filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once("=\"")?;
        Some((key.to_owned(), value.trim_end_matches('"').to_owned()))
    });
    Some((name.to_owned(), pairs.collect::<Option<_>>()?, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_summed_by_labels() {
        let metrics = Metrics::parse(
            "# TYPE a counter\na_total{op=\"get\",result=\"ok\"} 3\na_total{op=\"get\",result=\"late\"} 4\nb 1.5\n",
        );
        assert_eq!(metrics.sum("a_total", &[("op", "get")]), 7.0);
        assert_eq!(metrics.sum("a_total", &[("op", "get"), ("result", "ok")]), 3.0);
        assert_eq!(metrics.sum("b", &[]), 1.5);
        assert_eq!(metrics.sum("c", &[]), 0.0);
        assert!(metrics.has("b") && !metrics.has("c"));
        assert_eq!(Metrics::parse("b{c=\"1\"} 1\nb{c=\"2\"} 1\nb{c=\"1\"} 2\n").doubled(), ["b{c=\"1\"}"]);
        assert_eq!(metrics.series()[1..], ["a_total{op=\"get\",result=\"late\"}", "b{}"]);
    }
}
