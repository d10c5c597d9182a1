use super::*;
use crate::config::Copies;
use crate::wire::master::EventBundle;

fn pool(pages: u64) -> Pool {
    let config = Dram {
        capacity: pages * 4096,
        page: 4096,
        high: 0.9,
        low: 0.7,
        huge_page: None,
        numa_nodes: Vec::new(),
        numa_strict: false,
        prefault_threads: 1,
        copies: Copies { write_threads: 1, read_threads: 1, worth: 1, past_caches: None },
        prefault: false,
    };
    Pool::new(&config, Duration::from_secs(3600), &mut |what| panic!("{what}")).unwrap()
}

fn put(pool: &Pool, name: &str, bytes: &mut [u8]) {
    let extents = pool.take(bytes.len() as u64).unwrap();
    let piece = Piece { base: bytes.as_mut_ptr(), len: bytes.len() };
    // SAFETY: the extents were just taken, and the bytes are the test's.
    unsafe { pool.fill(&extents, bytes.len() as u64, &[piece]) };
    pool.show(vec![(name.to_owned(), bytes.len() as u64, extents)]);
}

fn read(pool: &Pool, name: &str) -> Option<Vec<u8>> {
    let pinned = pool.pin(name, None).ok()?;
    let mut bytes = vec![0; pinned.len as usize];
    // SAFETY: the vector is the test's.
    unsafe { pinned.read(&Range { offset: 0, piece: Piece { base: bytes.as_mut_ptr(), len: bytes.len() } }, false) };
    Some(bytes)
}

const BOUNDS: Bounds = Bounds { events: 2, bundles: 2 };

/// What a master makes of heartbeats.
#[derive(Debug, Default)]
struct Heard {
    names: std::collections::BTreeSet<String>,
    seq: u64,
}

impl Heard {
    /// Takes a heartbeat, or asks for everything.
    fn take(&mut self, beat: &Beat) -> Option<u64> {
        if beat.whole {
            self.names.clear();
            self.seq = beat.baseline;
        } else if beat.baseline != self.seq {
            return None;
        }
        for EventBundle { seq, events } in &beat.bundles {
            if !beat.whole {
                if *seq != self.seq + 1 {
                    return None;
                }
                self.seq = *seq;
            }
            for event in events {
                if event.kind == 0 {
                    self.names.insert(event.key.clone());
                } else {
                    self.names.remove(&event.key);
                }
            }
        }
        Some(self.seq)
    }

    fn hear(&mut self, pool: &Pool) {
        loop {
            let beat = pool.beat(BOUNDS);
            match self.take(&beat) {
                None => pool.tell_all(),
                Some(seq) => {
                    if !pool.taken(&beat, seq) {
                        return;
                    }
                }
            }
        }
    }
}

#[test]
fn what_was_used_longest_ago_goes_and_what_is_read_stays() {
    let pool = pool(4);
    for (number, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        put(&pool, name, &mut [number as u8; 4000]);
    }
    let pinned = pool.pin("a", Some(4000)).unwrap();
    assert!(pool.resolve("b").is_some(), "another node was told where it is");
    put(&pool, "e", &mut [9; 5000]);
    assert_eq!(pool.has(&["a", "b", "c", "d", "e"]), [true, true, false, false, true]);
    // Neither can go, and one page is not enough.
    assert!(pool.take(4 * 4096).is_none());
    assert_eq!(pool.has(&["a", "b", "e"]), [true, true, true], "nothing goes for what gets no room");
    let freed = |name: &str| pool.evict(&[name.to_owned()])[0];
    assert_eq!((freed("a"), freed("b"), freed("none")), (0, 0, 0));
    drop(pinned);
    assert_eq!(freed("a"), 4000);
    assert_eq!(read(&pool, "b").unwrap(), [1; 4000]);
    assert_eq!(read(&pool, "e").unwrap(), [9; 5000]);
    assert!(matches!(pool.pin("b", Some(3999)), Err(Got::Corrupt(_))));
}

#[test]
fn what_is_removed_while_it_is_read_keeps_its_memory_until_then() {
    let pool = pool(2);
    put(&pool, "a", &mut [1; 4096]);
    let pinned = pool.pin("a", None).unwrap();
    assert_eq!(pool.remove(&["a", "a"]), [true, false]);
    assert!(read(&pool, "a").is_none());
    put(&pool, "a", &mut [2; 4096]);
    assert!(pool.take_spare(1, 1.0).is_none(), "both pages are in use");
    let mut old = [0; 4096];
    // SAFETY: the bytes are the test's.
    unsafe { pinned.read(&Range { offset: 0, piece: Piece { base: old.as_mut_ptr(), len: old.len() } }, false) };
    assert_eq!(old, [1; 4096]);
    drop(pinned);
    assert_eq!(read(&pool, "a").unwrap(), [2; 4096]);
    assert!(pool.take_spare(1, 1.0).is_some());
    // The same by a lease of another node, which says when it is done.
    let (lease, found) = pool.hold(&["a".to_owned(), "none".to_owned()], Duration::from_secs(3600));
    assert_eq!(found.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
    assert_eq!(pool.remove(&["a"]), [true]);
    assert!(pool.take(4096).is_none());
    pool.release(lease);
    assert!(pool.take(4096).is_some());
}

#[test]
fn places_are_shown_when_they_are_full_and_by_their_name_alone() {
    let pool = pool(8);
    let Allocated::Yes(id, pages) = pool.allocate("a", 5000) else { panic!("there is room") };
    assert_eq!((pages.len(), pool.allocate("a", 1), pool.has(&["a"])), (2, Allocated::Pending, vec![false]));
    assert_eq!(pool.allocate("b", 9 * 4096), Allocated::NoSpace);
    // Filling that is broken off.
    drop(pool.write(id, 5000).unwrap());
    assert!(!pool.commit(id, "a").0);
    assert!(pool.write(id, 4999).is_none() && pool.write(id + 1, 5000).is_none());
    let writing = pool.write(id, 5000).unwrap();
    assert!(pool.write(id, 5000).is_none(), "one at a time");
    assert!(!pool.commit(id, "a").0, "not before its bytes are there");
    for piece in &writing.pieces {
        // SAFETY: the place is this one's.
        unsafe { std::ptr::write_bytes(piece.base, 7, piece.len) };
    }
    writing.done();
    assert!(!pool.commit(id, "b").0);
    assert!(pool.commit(id, "a").0 && !pool.commit(id, "a").0);
    assert_eq!(read(&pool, "a").unwrap(), [7; 5000]);
    assert_eq!(pool.allocate("a", 5000), Allocated::Exists);
    let Allocated::Yes(id, _) = pool.allocate("c", 1) else { panic!("there is room") };
    pool.abort(id);
    assert!(pool.write(id, 1).is_none() && pool.take(6 * 4096).is_some(), "its page is free again");
}

#[test]
fn places_from_before_a_clear_are_not_shown_after_it() {
    let pool = pool(8);
    put(&pool, "x/a", &mut [1; 10]);
    put(&pool, "y/a", &mut [1; 10]);
    let Allocated::Yes(id, _) = pool.allocate("x/b", 10) else { panic!("there is room") };
    pool.clear("x/");
    assert!(pool.write(id, 10).is_none() && !pool.commit(id, "x/b").0);
    assert_eq!(pool.has(&["x/a", "x/b", "y/a"]), [false, false, true]);
    let Allocated::Yes(next, _) = pool.allocate("x/b", 10) else { panic!("the name is free again") };
    assert!(pool.commit(next, "x/b").0);
    pool.abort(id);
    assert_eq!(pool.has(&["x/b"]), [true]);
}

#[test]
fn a_master_that_hears_all_heartbeats_knows_what_is_here() {
    let (pool, mut heard) = (pool(64), Heard::default());
    let names = |pool: &Pool| {
        let all: std::collections::BTreeSet<String> =
            (0..40).map(|number| format!("n{number}")).filter(|name| pool.has(&[name]) == [true]).collect();
        all
    };
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..200 {
        for _ in 0..random.usize(0..12) {
            let name = format!("n{}", random.u8(0..40));
            if pool.has(&[&name]) == [true] {
                pool.remove(&[&name]);
            } else {
                put(&pool, &name, &mut [1; 10]);
            }
        }
        match random.u8(0..6) {
            // A heartbeat that arrives, and whose answer does not.
            0 => {
                let beat = pool.beat(BOUNDS);
                heard.take(&beat);
            }
            // One that does not arrive.
            1 => {
                pool.beat(BOUNDS);
            }
            // A new master.
            2 => {
                heard = Heard { seq: 99, ..Heard::default() };
                pool.tell_all();
            }
            _ => {}
        }
        heard.hear(&pool);
        assert_eq!(heard.names, names(&pool), "round {round}");
        assert!(pool.wait_acknowledged(pool.happened(), Instant::now()));
        assert!(!pool.is_leaving("n0"));
    }
}

#[test]
fn what_has_gone_is_leaving_until_the_master_has_heard() {
    let (pool, mut heard) = (pool(8), Heard::default());
    put(&pool, "a", &mut [1; 10]);
    heard.hear(&pool);
    assert!(!pool.is_leaving("a"));
    pool.remove(&["a"]);
    assert!(pool.is_leaving("a") && !pool.wait_acknowledged(pool.happened(), Instant::now()));
    heard.hear(&pool);
    assert!(!pool.is_leaving("a"));
    pool.remove(&["a"]);
    put(&pool, "a", &mut [1; 10]);
    assert!(!pool.is_leaving("a"));
}

/// A flush right after the start, or after the master asked for everything, was over before the master knew anything: nothing had happened since.
#[test]
fn what_the_master_has_to_be_told_from_the_beginning_was_taken_for_told() {
    let (pool, mut heard) = (pool(16_400), Heard::default());
    let told = |pool: &Pool| pool.wait_acknowledged(pool.happened(), Instant::now());
    assert!(!told(&pool), "the master does not know that there is nothing");
    heard.hear(&pool);
    assert!(told(&pool));
    let name = |number: usize| format!("n{number}");
    let objects = (0..16_390).map(|number| (name(number), 10, pool.take(10).unwrap())).collect();
    pool.show(objects);
    heard.hear(&pool);
    assert!(told(&pool));
    pool.tell_all();
    assert!(!told(&pool));
    // One message does not hold all of it; the others count too.
    let beat = pool.beat(BOUNDS);
    let seq = heard.take(&beat).unwrap();
    assert!(beat.whole && pool.taken(&beat, seq), "there is more");
    assert!(!told(&pool));
    heard.hear(&pool);
    assert!(told(&pool) && heard.names.len() == 16_390);
}
