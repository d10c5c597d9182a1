//! The radix tree of the cache beside a flat map of whole keys, which stores and compares the same tokens and can match no prefix: what
//! any index over tokens has to spend at the least.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, bail};
use hashbrown::HashMap;
use kvdock::cache::CacheNamespace;
use kvdock::cache::unified::{Component, Insert, NodeId, Step, Tree, TreeConfig};

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{Turns, side_by_side};
use crate::sglang::{MISSING, NativeTree};

/// Tokens of a page.
const PAGE: usize = 16;
/// Tokens of a key.
const KEY: usize = 2048;
/// Pages of a key.
const PAGES: usize = KEY / PAGE;
/// Keys of a sample: few enough that, as in a server, the key is in a near cache when it is looked up; what the index has is not.
const SAMPLE: usize = 64;

/// How many times more turns than elsewhere: one takes a tenth of a millisecond.
const MORE: usize = 6;

/// Pages beside which SGLang's core is measured as well, and how many times faster ours is to be.
const BESIDE_SGLANG: usize = 1_000_000;
const FASTER: f64 = 3.0;

/// A small generator: what is measured is the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as u32
    }

    fn key(&mut self) -> Vec<u32> {
        (0..KEY).map(|_| self.next() % 150_000).collect()
    }
}

/// Both sides, filled alike.
struct Sides {
    tree: Tree,
    root: NodeId,
    map: HashMap<Box<[u32]>, Box<[u32]>>,
    /// Keys in the order in which they came; the tree evicts by it.
    keys: VecDeque<Vec<u32>>,
    random: Random,
    next: u32,
}

impl Sides {
    fn new(pages: usize) -> Result<Self> {
        let mut tree = Tree::new(TreeConfig { page_size: PAGE, ..TreeConfig::default() })?;
        let root = tree.root(&CacheNamespace::default());
        let mut sides = Sides {
            tree,
            root,
            map: HashMap::new(),
            keys: VecDeque::new(),
            random: Random(88_172_645_463_325_252),
            next: 0,
        };
        for _ in 0..pages.div_ceil(PAGES) {
            let key = sides.random.key();
            let table = sides.table();
            sides.insert(&key, &mut table.clone())?;
            sides.map.insert(key.clone().into(), table.into());
            sides.keys.push_back(key);
        }
        Ok(sides)
    }

    fn table(&mut self) -> Vec<u32> {
        self.next += PAGES as u32;
        (self.next - PAGES as u32..self.next).collect()
    }

    fn insert(&mut self, key: &[u32], table: &mut [u32]) -> Result<()> {
        let insert = Insert { from: self.root, tokens: key, full: table, window: &mut [], state: None, priority: 0 };
        let inserted = self.tree.insert(insert)?;
        if inserted.pages != PAGES {
            bail!("{} of {PAGES} pages were inserted", inserted.pages);
        }
        Ok(())
    }

    fn pick(&mut self, tokens: usize) -> Vec<Vec<u32>> {
        (0..SAMPLE).map(|_| self.keys[self.random.next() as usize % self.keys.len()][..tokens].to_vec()).collect()
    }

    /// Time of one match of the first `tokens` of keys from all over the tree, page table included.
    fn match_tree(&mut self, tokens: usize) -> Result<f64> {
        let picked = self.pick(tokens);
        let start = Instant::now();
        for key in &picked {
            let found = self.tree.find(self.root, key);
            let Some(end) = found.map(|found| found.device).filter(|end| end.pages as usize == tokens / PAGE) else {
                bail!("a key that was inserted was not found");
            };
            black_box(self.tree.device_table(Component::Full, end.node)?);
        }
        Ok(micros(start))
    }

    fn match_map(&mut self) -> Result<f64> {
        let picked = self.pick(KEY);
        let start = Instant::now();
        for key in &picked {
            let Some(table) = self.map.get(key.as_slice()) else { bail!("a key that was inserted was not found") };
            black_box(table.to_vec());
        }
        Ok(micros(start))
    }

    /// Time of one insert into a full cache: the oldest key leaves for it. The map is kept alike, untimed.
    fn insert_tree(&mut self) -> Result<f64> {
        let fresh = self.fresh();
        let start = Instant::now();
        for (key, table) in &fresh {
            match self.tree.evict_device(Component::Full, PAGES) {
                Step::Freed(actions) => drop(black_box(actions)),
                step => bail!("no room: {step:?}"),
            }
            self.insert(key, &mut table.clone())?;
        }
        let took = micros(start);
        for (key, table) in fresh {
            self.turn_over(key, table);
        }
        Ok(took)
    }

    fn insert_map(&mut self) -> Result<f64> {
        let fresh = self.fresh();
        let start = Instant::now();
        for ((key, table), old) in fresh.iter().zip(&self.keys) {
            black_box(self.map.remove(old.as_slice()));
            self.map.insert(Box::from(key.as_slice()), Box::from(table.as_slice()));
        }
        let took = micros(start);
        for (key, table) in fresh {
            drop(self.tree.evict_device(Component::Full, PAGES));
            self.insert(&key, &mut table.clone())?;
            self.turn_over(key, table);
        }
        Ok(took)
    }

    fn fresh(&mut self) -> Vec<(Vec<u32>, Vec<u32>)> {
        (0..SAMPLE).map(|_| (self.random.key(), self.table())).collect()
    }

    fn turn_over(&mut self, key: Vec<u32>, table: Vec<u32>) {
        if let Some(old) = self.keys.pop_front() {
            self.map.remove(old.as_slice());
        }
        self.map.insert(Box::from(key.as_slice()), table.into());
        self.keys.push_back(key);
    }
}

/// Time of one of a sample's operations, in microseconds.
fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6 / SAMPLE as f64
}

/// Adds the rows.
///
/// # Errors
/// When the tree refuses what it must not refuse.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let row = |name: String, turns: Turns| Row::new(name, turns, Better::Less, Goal::None);
    let rounds = bench.rounds.times(MORE);
    for (pages, shown) in [(100_000, "100,000"), (1_000_000, "1,000,000")] {
        let matching = format!("tree, match of 2,048 tokens beside {shown} pages (us), peer flat map of whole keys");
        let part = format!("tree, match of 512 tokens beside {shown} pages (us), peer 2,048 tokens");
        let inserting =
            format!("tree, insert of 2,048 tokens into full {shown} pages (us), peer flat map of whole keys");
        let memory = format!("tree, memory a page of {shown} (B), peer its tokens and number alone");
        let [theirs, theirs_too] = sglang_names(shown);
        if ![&matching, &part, &inserting, &memory, &theirs, &theirs_too].into_iter().any(|name| bench.wants(name)) {
            continue;
        }
        let sides = RefCell::new(Sides::new(pages)?);
        let ours = |tokens| sides.borrow_mut().match_tree(tokens);
        report.add(row(matching, side_by_side(rounds, || ours(KEY), || sides.borrow_mut().match_map())?))?;
        report.add(row(part, side_by_side(rounds, || ours(KEY / 4), || ours(KEY))?))?;
        let sampled = side_by_side(rounds, || sides.borrow_mut().insert_tree(), || sides.borrow_mut().insert_map())?;
        report.add(row(inserting, sampled))?;
        if pages == BESIDE_SGLANG {
            beside_sglang(bench, report, &sides, shown)?;
        }
        let sides = sides.into_inner();
        let bytes = sides.tree.bytes() as f64 / sides.tree.sizes(Component::Full).device as f64;
        report.add(row(memory, Turns::once(bytes, (PAGE + 1) as f64 * 4.0)))?;
    }
    Ok(())
}

fn sglang_names(pages: &str) -> [String; 2] {
    ["match of 2,048 tokens beside", "insert of 2,048 tokens into full"]
        .map(|what| format!("tree, {what} {pages} pages (us), peer SGLang's native core through its binding"))
}

/// Ours makes room for what it inserts; theirs is not full and needs none.
fn beside_sglang(bench: &Bench, report: &mut Report, sides: &RefCell<Sides>, shown: &str) -> Result<()> {
    let [matching, inserting] = sglang_names(shown);
    if ![&matching, &inserting].into_iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    let Some(theirs) = NativeTree::filled(BESIDE_SGLANG, KEY)? else {
        return [matching, inserting].iter().try_for_each(|name| report.skip(name, MISSING));
    };
    let theirs = RefCell::new(theirs);
    let rounds = bench.rounds.times(MORE);
    let each = |seconds: f64| seconds * 1e6 / SAMPLE as f64;
    let row = |name: String, turns| Row::new(name, turns, Better::Less, Goal::Ratio(FASTER));
    let matches = || Ok(each(theirs.borrow_mut().matches(SAMPLE)?));
    report.add(row(matching, side_by_side(rounds, || sides.borrow_mut().match_tree(KEY), matches)?))?;
    let inserts = || Ok(each(theirs.borrow_mut().inserts(SAMPLE)?));
    report.add(row(inserting, side_by_side(rounds, || sides.borrow_mut().insert_tree(), inserts)?))
}
