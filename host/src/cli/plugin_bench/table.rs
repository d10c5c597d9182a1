//! The results as a table that is printed while they come.

use super::event::{Kind, Row};
use super::plan::page_size;

/// Titles of the columns.
pub(super) fn header() -> String {
    line(["page", "pages/call", "threads", "call", "throughput", "of copy", "p50", "p99", "calls"])
}

fn line(columns: [&str; 9]) -> String {
    let [page, batch, threads, call, throughput, of_copy, p50, p99, calls] = columns;
    let text = format!(
        "{page:>7} {batch:>10} {threads:>7}  {call:<9} {throughput:>13} {of_copy:>8} {p50:>9} {p99:>9} {calls:>8}"
    );
    text.trim_end().to_owned() + "\n"
}

/// One result.
pub(super) fn row(row: &Row) -> String {
    let throughput = match row.call {
        Kind::Exists => format!("{} keys/s", count(row.pages_per_second)),
        _ => format!("{:.2} GiB/s", row.pages_per_second * row.page_bytes as f64 / f64::from(1 << 30)),
    };
    let of_copy = row.of_copy.map_or_else(String::new, |of_copy| format!("{:.1}%", of_copy * 100.0));
    line([
        &page_size(row.page_bytes),
        &row.batch.to_string(),
        &row.threads.to_string(),
        row.call.name(),
        &throughput,
        &of_copy,
        &time(row.p50_us),
        &time(row.p99_us),
        &row.calls.to_string(),
    ])
}

/// Microseconds in the unit that suits them.
fn time(micros: f64) -> String {
    match micros {
        ..100.0 => format!("{micros:.1} us"),
        ..1_000.0 => format!("{micros:.0} us"),
        ..100_000.0 => format!("{:.1} ms", micros / 1_000.0),
        ..1_000_000.0 => format!("{:.0} ms", micros / 1_000.0),
        _ => format!("{:.1} s", micros / 1_000_000.0),
    }
}

fn count(number: f64) -> String {
    match number {
        ..1_000.0 => format!("{number:.0}"),
        ..1_000_000.0 => format!("{:.0} k", number / 1_000.0),
        _ => format!("{:.1} M", number / 1_000_000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_a_line_under_its_titles() {
        let get = Row {
            call: Kind::Get,
            page_bytes: 1 << 20,
            batch: 32,
            threads: 4,
            calls: 77,
            pages: 2464,
            refused: 0,
            bad: 0,
            pages_per_second: 2048.0,
            of_copy: Some(0.25),
            p50_us: 15_000.0,
            p99_us: 31.25,
        };
        let text = row(&get);
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["1", "MiB", "32", "4", "get", "2.00", "GiB/s", "25.0%", "15.0", "ms", "31.2", "us", "77"]);
        assert_eq!(text.len(), header().len());
        let exists = Row { call: Kind::Exists, of_copy: None, pages_per_second: 1_234_567.0, ..get };
        assert!(row(&exists).contains("1.2 M keys/s"));
    }
}
