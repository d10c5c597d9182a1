//! `kvdock-bench-growth`: what the cache costs as it grows, over simulated pools. `cargo xtask bench growth` starts it.

mod canvas;
#[path = "growth/curve.rs"]
mod curve;
#[path = "growth/keys.rs"]
mod keys;
#[path = "growth/manager.rs"]
mod manager;
mod plot;
#[path = "growth/simulated.rs"]
mod simulated;
#[path = "growth/tree.rs"]
mod tree;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;

use crate::curve::Curve;
use crate::plot::{Line, Panel};

/// Measures time and memory by page, by request and by attached backend as the cache grows.
#[derive(Parser)]
#[command(name = "kvdock-bench-growth")]
struct Arguments {
    /// Fewer repetitions and no size beyond a million pages.
    #[arg(long)]
    quick: bool,
    /// The most pages.
    #[arg(long)]
    pages: Option<usize>,
    /// Where growth.png goes.
    #[arg(long, value_name = "DIR")]
    pictures: PathBuf,
    /// Also write the curves to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Backends that are attached where their cost is looked for; what one adds is this part of the difference.
const BACKENDS: usize = 4;

/// The curves, by what they count.
struct Curves {
    requests: Vec<Curve>,
    pages: Vec<Curve>,
    open: Vec<Curve>,
    backends: Vec<Curve>,
}

impl Curves {
    fn new() -> Self {
        let us = |name: &str| Curve::new(name, "us");
        let bytes = |name: &str| Curve::new(name, "B");
        Self {
            requests: vec![
                us("tree: match of 2,048 tokens"),
                us("tree: insert of 2,048 tokens"),
                us("manager: request that hits"),
                us("manager: request that misses"),
            ],
            pages: vec![
                bytes("tree"),
                bytes("manager, device tier alone"),
                bytes("manager, host tier too"),
                bytes("each attached backend"),
            ],
            open: vec![bytes("request that holds 2,048 tokens")],
            backends: vec![
                us("added to a request that misses"),
                us("added to a request that hits"),
                us("attach of one more, scheduler's time"),
            ],
        }
    }

    fn all(&self) -> impl Iterator<Item = (&'static str, &Curve)> {
        (self.requests.iter().map(|curve| ("time of a request", curve)))
            .chain(self.pages.iter().map(|curve| ("memory of a page", curve)))
            .chain(self.open.iter().map(|curve| ("memory of a request", curve)))
            .chain(self.backends.iter().map(|curve| ("each attached backend", curve)))
    }

    /// Measures everything at one size.
    fn measure(&mut self, pages: usize, rounds: usize) -> Result<()> {
        let x = pages as f64;
        let tree = tree::measure(pages, rounds).context("the tree")?;
        let alone = manager::measure(pages, None, rounds).context("the cache without a host tier")?;
        let none = manager::measure(pages, Some(0), rounds).context("the cache without a backend")?;
        let some = manager::measure(pages, Some(BACKENDS), rounds).context("the cache with backends")?;
        // What is lost in the noise of two measurements is 0 and has no place in the picture.
        let each = |some: f64, none: f64| ((some - none) / BACKENDS as f64).max(0.0);
        for (curves, values) in [
            (&mut self.requests, vec![tree.find, tree.insert, alone.hit, alone.fresh]),
            (&mut self.pages, vec![tree.bytes, alone.bytes, none.bytes, each(some.bytes, none.bytes)]),
            (&mut self.open, vec![alone.open]),
            (
                &mut self.backends,
                vec![each(some.fresh, none.fresh), each(some.hit, none.hit), some.attach.unwrap_or(0.0)],
            ),
        ] {
            curves.iter_mut().zip(values).for_each(|(curve, value)| curve.points.push((x, value)));
        }
        Ok(())
    }

    fn panels(&self) -> Vec<Panel> {
        let panel = |title: &str, up: &str, curves: &[Curve]| Panel {
            title: title.to_owned(),
            across: "pages that are cached".to_owned(),
            up: up.to_owned(),
            lines: curves.iter().map(|curve| Line { name: curve.name.clone(), points: curve.points.clone() }).collect(),
        };
        vec![
            panel("time of a request", "microseconds", &self.requests),
            panel("memory of a page", "bytes", &self.pages),
            panel("memory of an open request", "bytes", &self.open),
            panel("each attached backend", "microseconds", &self.backends),
        ]
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let most = arguments.pages.unwrap_or(if arguments.quick { 1_000_000 } else { 10_000_000 });
    let (rounds, budget) = if arguments.quick { (3, Duration::from_secs(60)) } else { (7, Duration::from_secs(1800)) };
    let mut curves = Curves::new();
    let mut pages = 1000;
    while pages <= most {
        let begin = Instant::now();
        curves.measure(pages, rounds).with_context(|| format!("{pages} pages"))?;
        let took = begin.elapsed();
        eprintln!("{pages} pages: {:.1} s", took.as_secs_f64());
        // The next size takes about ten times as long.
        if took * 10 > budget && pages * 10 <= most {
            eprintln!(
                "sizes from {} pages on are left out: they would take about {} s",
                pages * 10,
                took.as_secs() * 10
            );
            break;
        }
        pages *= 10;
    }
    let mut json = arguments
        .json
        .as_ref()
        .map(|path| std::fs::File::create(path).with_context(|| format!("can't create {}", path.display())))
        .transpose()?;
    for (group, curve) in curves.all() {
        println!("{group}, {}:", curve.name);
        let points: Vec<String> =
            curve.points.iter().map(|(pages, value)| format!("{pages:e}: {value:.2} {}", curve.unit)).collect();
        println!("    {}", points.join(", "));
        println!("    {}", curve.words());
        if let Some(file) = &mut json {
            let line = serde_json::json!({
                "name": format!("growth, {group}, {}", curve.name),
                "unit": curve.unit,
                "points": curve.points,
                "exponent": curve.exponent(),
                "words": curve.words(),
            });
            writeln!(file, "{line}").context("can't write a curve to the JSON file")?;
        }
    }
    let picture = arguments.pictures.join("growth.png");
    plot::write(&picture, &curves.panels())?;
    println!("the curves are in {}", picture.display());
    Ok(())
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
