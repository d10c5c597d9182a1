//! A row of the report: one figure of ours beside one of a peer.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::plot::Line;
use crate::sample::Turns;

/// What a row asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least this part of the peer's rate, or at most its inverse of the peer's time.
    Ratio(f64),
    /// At most this many times the peer's time.
    Times(f64),
    /// At most this much more than the peer, in the row's unit.
    Over(f64),
    /// Nothing; the row is for information.
    None,
}

/// Whether more is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// A rate.
    More,
    /// A time.
    Less,
}

/// One figure of ours beside one of a peer.
#[derive(Clone, Debug)]
pub struct Row {
    /// What is measured, with its unit.
    pub name: String,
    /// What both sides came to.
    pub turns: Turns,
    /// Which way is up.
    pub better: Better,
    /// What is asked for.
    pub goal: Goal,
}

#[derive(Serialize)]
struct Shown<'a> {
    name: &'a str,
    ours: f64,
    peer: f64,
    ratio: f64,
    goal: Option<String>,
    met: Option<bool>,
}

impl Row {
    /// A row.
    pub fn new(name: impl Into<String>, turns: Turns, better: Better, goal: Goal) -> Self {
        Self { name: name.into(), turns, better, goal }
    }

    /// How much better ours is than the peer's: above 1 is better, whichever way is up. The median of all turns.
    pub fn ratio(&self) -> f64 {
        match self.better {
            Better::More => self.turns.quotient,
            Better::Less => 1.0 / self.turns.quotient,
        }
    }

    /// Between which ratios the middle half of all turns lies.
    fn middle_half(&self) -> (f64, f64) {
        let mut ratios: Vec<f64> = self
            .turns
            .each
            .iter()
            .map(|(ours, peer)| match self.better {
                Better::More => ours / peer,
                Better::Less => peer / ours,
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        let at = |place: usize| ratios.get(place).copied().unwrap_or(f64::NAN);
        (at(ratios.len() / 4), at((ratios.len() * 3).div_ceil(4).saturating_sub(1)))
    }

    /// Whether the goal is met; none without a goal.
    pub fn met(&self) -> Option<bool> {
        match self.goal {
            Goal::Ratio(least) => Some(self.ratio() >= least),
            Goal::Times(most) => Some(self.turns.quotient <= most),
            Goal::Over(most) => Some(self.turns.ours - self.turns.peer <= most),
            Goal::None => None,
        }
    }

    fn goal_text(&self) -> Option<String> {
        match self.goal {
            Goal::Ratio(least) => Some(format!("ratio >= {least}")),
            Goal::Times(most) => Some(format!("<= {most} times")),
            Goal::Over(most) => Some(format!("<= {most} over")),
            Goal::None => None,
        }
    }

    fn line(&self) -> Shown<'_> {
        Shown {
            name: &self.name,
            ours: self.turns.ours,
            peer: self.turns.peer,
            ratio: self.ratio(),
            goal: self.goal_text(),
            met: self.met(),
        }
    }
}

/// The rows so far.
pub struct Report {
    rows: Vec<Row>,
    /// Rows that could not be measured here, and why.
    skipped: Vec<(String, String)>,
    json: Option<File>,
    /// Where each turn of each row goes.
    turns: Option<File>,
}

impl Report {
    /// An empty report; rows also go to the file `json` as they come, and what each turn of them gave to the file `turns`.
    ///
    /// # Errors
    /// When a file can't be created.
    pub fn new(json: Option<&Path>, turns: Option<&Path>) -> Result<Self> {
        let create = |path: &Path| File::create(path).with_context(|| format!("can't create {}", path.display()));
        Ok(Self {
            rows: Vec::new(),
            skipped: Vec::new(),
            json: json.map(create).transpose()?,
            turns: turns.map(create).transpose()?,
        })
    }

    /// Takes a row in.
    ///
    /// # Errors
    /// When it can't be written to the file.
    pub fn add(&mut self, row: Row) -> Result<()> {
        eprintln!("{}", table_line(&row, row.name.len()));
        if let Some(file) = &mut self.json {
            let line = serde_json::to_string(&row.line()).context("can't write a row as JSON")?;
            writeln!(file, "{line}").context("can't write a row to the JSON file")?;
        }
        if let Some(file) = &mut self.turns {
            let line = serde_json::json!({"name": row.name, "turns": row.turns.each});
            writeln!(file, "{line}").context("can't write a row's turns to their file")?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Says that a row can't be measured on this machine.
    ///
    /// # Errors
    /// When it can't be written to the file.
    pub fn skip(&mut self, name: &str, reason: &str) -> Result<()> {
        eprintln!("{name}  skipped: {reason}");
        if let Some(file) = &mut self.json {
            let line = serde_json::json!({"name": name, "skipped": reason});
            writeln!(file, "{line}").context("can't write a row to the JSON file")?;
        }
        self.skipped.push((name.to_owned(), reason.to_owned()));
        Ok(())
    }

    /// Keeps curves: they have no place in the table.
    ///
    /// # Errors
    /// When they can't be written to the file.
    pub fn curve(&mut self, name: &str, unit: &str, lines: &[Line]) -> Result<()> {
        let Some(file) = &mut self.json else { return Ok(()) };
        let lines: Vec<_> =
            lines.iter().map(|line| serde_json::json!({"name": line.name, "points": line.points})).collect();
        let line = serde_json::json!({"name": name, "unit": unit, "curves": lines});
        writeln!(file, "{line}").context("can't write a curve to the JSON file")
    }

    /// Prints the table.
    pub fn print(&self) {
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        println!(
            "{:width$}  {:>10}  {:>10}  {:>7}  {:>5}  {:>11}  goal",
            "row", "ours", "peer", "ratio", "turns", "middle half"
        );
        for row in &self.rows {
            println!("{}", table_line(row, width));
        }
        for (name, reason) in &self.skipped {
            println!("{name:width$}  skipped: {reason}");
        }
    }
}

fn table_line(row: &Row, width: usize) -> String {
    let verdict = match (row.goal_text(), row.met()) {
        (Some(goal), Some(true)) => format!("{goal}: met"),
        (Some(goal), _) => format!("{goal}: MISSED"),
        (None, _) => "-".to_owned(),
    };
    let (low, high) = row.middle_half();
    format!(
        "{:width$}  {:>10}  {:>10}  {:>7.2}  {:>5}  {:>11}  {verdict}",
        row.name,
        figure(row.turns.ours),
        figure(row.turns.peer),
        row.ratio(),
        row.turns.each.len(),
        format!("{low:.2}-{high:.2}"),
    )
}

/// Three or four significant digits.
fn figure(value: f64) -> String {
    match value.abs() {
        0.0..1.0 => format!("{value:.4}"),
        1.0..10.0 => format!("{value:.3}"),
        10.0..1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ours: f64, peer: f64, better: Better, goal: Goal) -> Row {
        Row::new("row", Turns::once(ours, peer), better, goal)
    }

    #[test]
    fn a_higher_rate_and_a_shorter_time_are_better() {
        assert_eq!(row(80.0, 100.0, Better::More, Goal::Ratio(0.8)).met(), Some(true));
        assert_eq!(row(79.0, 100.0, Better::More, Goal::Ratio(0.8)).met(), Some(false));
        assert_eq!(row(0.1, 3.0, Better::Less, Goal::Ratio(30.0)).met(), Some(true));
        assert_eq!(row(0.2, 3.0, Better::Less, Goal::Ratio(30.0)).met(), Some(false));
        assert_eq!(row(45.0, 30.0, Better::Less, Goal::Times(1.5)).met(), Some(true));
        assert_eq!(row(46.0, 30.0, Better::Less, Goal::Times(1.5)).met(), Some(false));
        assert_eq!(row(39.0, 30.0, Better::Less, Goal::Over(10.0)).met(), Some(true));
        assert_eq!(row(41.0, 30.0, Better::Less, Goal::Over(10.0)).met(), Some(false));
        assert_eq!(row(1.0, 2.0, Better::More, Goal::None).met(), None);
    }

    #[test]
    fn the_middle_half_leaves_out_the_outer_quarters() {
        let turns = |count: u32| (1..=count).map(|turn| (f64::from(turn), 1.0)).collect();
        let half = |count| Row::new("row", Turns::of(turns(count)), Better::More, Goal::None).middle_half();
        assert_eq!((half(1), half(3), half(4), half(8)), ((1.0, 1.0), (1.0, 3.0), (2.0, 3.0), (3.0, 6.0)));
        let slower = Row::new("row", Turns::once(2.0, 1.0), Better::Less, Goal::None);
        assert_eq!(slower.middle_half(), (0.5, 0.5));
    }

    #[test]
    fn the_json_line_has_the_agreed_keys() {
        let row = row(80.0, 100.0, Better::More, Goal::Ratio(0.8));
        let line = serde_json::to_value(row.line()).unwrap();
        let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["name", "ours", "peer", "ratio", "goal", "met"]);
    }
}
