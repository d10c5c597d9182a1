//! The unified tree alone.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use kvdock::cache::CacheNamespace;
use kvdock::cache::unified::{Component, Insert, NodeId, Step, Tree, TreeConfig};

use super::curve::median;
use super::keys::{PAGES, TOKENS, heap, prompt};
use super::simulated::PAGE;

/// Operations of one sample.
const SAMPLE: u64 = 64;

/// What was measured at one size.
pub struct Measured {
    /// Microseconds to match a prompt that is there, its page table included.
    pub find: f64,
    /// Microseconds to insert a prompt where the oldest one has to leave for it.
    pub insert: f64,
    /// Bytes a page.
    pub bytes: f64,
}

/// Measures a tree of `pages` pages.
///
/// # Errors
/// When the tree refuses what it must not refuse.
pub fn measure(pages: usize, rounds: usize) -> Result<Measured> {
    let prompts = (pages / PAGES).max(1) as u64;
    let before = heap();
    let mut tree = Tree::new(TreeConfig { page_size: PAGE, ..TreeConfig::default() })?;
    let root = tree.root(&CacheNamespace::default());
    let mut next = 0;
    for index in 0..prompts {
        insert(&mut tree, root, &prompt(index), &mut next)?;
    }
    let bytes = (heap() - before) / (prompts * PAGES as u64) as f64;

    let (mut first, mut found, mut inserted) = (0, Vec::new(), Vec::new());
    for round in 0..=rounds {
        let picked: Vec<Vec<u32>> =
            (0..SAMPLE).map(|number| prompt(first + (number * 7919 + round as u64 * 31) % prompts)).collect();
        let begin = Instant::now();
        for tokens in &picked {
            let Some(end) = tree.find(root, tokens).map(|found| found.device).filter(|end| end.pages as usize == PAGES)
            else {
                bail!("a prompt that was inserted was not found");
            };
            black_box(tree.device_table(Component::Full, end.node)?);
        }
        found.push(micros(begin));
        let fresh: Vec<Vec<u32>> = (0..SAMPLE).map(|number| prompt(first + prompts + number)).collect();
        let begin = Instant::now();
        for tokens in &fresh {
            match tree.evict_device(Component::Full, PAGES) {
                Step::Freed(actions) => drop(black_box(actions)),
                step => bail!("no room: {step:?}"),
            }
            insert(&mut tree, root, tokens, &mut next)?;
        }
        inserted.push(micros(begin));
        first += SAMPLE;
    }
    // The first turn warms up.
    let result = Measured { find: median(found.split_off(1)), insert: median(inserted.split_off(1)), bytes };
    Ok(result)
}

fn insert(tree: &mut Tree, root: NodeId, tokens: &[u32], next: &mut u32) -> Result<()> {
    let mut table: Vec<u32> = (0..PAGES as u32).map(|page| next.wrapping_add(page)).collect();
    *next = next.wrapping_add(PAGES as u32);
    let insert = Insert { from: root, tokens, full: &mut table, window: &mut [], state: None, priority: 0 };
    let inserted = tree.insert(insert)?;
    ensure!(inserted.pages == PAGES, "{} of {PAGES} pages of {TOKENS} tokens were inserted", inserted.pages);
    Ok(())
}

fn micros(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e6 / SAMPLE as f64
}
