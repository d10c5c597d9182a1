//! The table of timings.

use std::fmt::Write as _;

/// Rows of what was measured.
pub struct Table {
    title: String,
    rows: Vec<[String; 5]>,
}

impl Table {
    pub fn new(device: &str) -> Self {
        Self { title: format!("{device}, {}", driver()), rows: Vec::new() }
    }

    /// A row: what, the time, the rate, the fraction of the limit and of what, and the goal.
    pub fn row(&mut self, what: &str, seconds: f64, rate: String, of: Option<(f64, &str)>, goal: &str) {
        let of = of.map_or(String::new(), |(fraction, limit)| format!("{:.0} % of {limit}", 100.0 * fraction));
        self.rows.push([what.to_owned(), format!("{:.3} ms", 1e3 * seconds), rate, of, goal.to_owned()]);
    }

    /// A line without numbers.
    pub fn note(&mut self, text: &str) {
        self.rows.push([text.to_owned(), String::new(), String::new(), String::new(), String::new()]);
    }

    /// As Markdown.
    pub fn text(&self) -> String {
        let mut text =
            format!("# {}\n\n| what | time | rate | fraction | goal |\n| --- | --- | --- | --- | --- |\n", self.title);
        for row in &self.rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        text
    }
}

/// The driver's version, as the kernel module tells it.
fn driver() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version = text
        .split_whitespace()
        .find(|word| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'));
    version.map_or("driver unknown".to_owned(), |version| format!("driver {version}"))
}
