//! Threads at one log of segments.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kvdock_plugin_umbp::object::Piece;
use kvdock_plugin_umbp::segment::{Item, Location, Log, Options};

/// Bytes of a value; four records fill a segment.
const BYTES: usize = 12_000;
const OPTIONS: Options = Options { segment: 65536, strict: false, direct: true, verify: true, follower: false };

fn append(log: &Log, value: &[u8], keys: &[&str]) -> Vec<Location> {
    let piece = [Piece { base: value.as_ptr().cast_mut(), len: value.len() }];
    let items: Vec<Item<'_>> = keys.iter().map(|key| Item { key: key.as_bytes(), pieces: &piece }).collect();
    // SAFETY: the value is borrowed for the call.
    unsafe { log.append(&items) }.unwrap()
}

fn found(dir: &Path) -> Vec<String> {
    // One that follows keeps nobody out.
    let options = Options { follower: true, ..OPTIONS };
    let (_log, found) = Log::open(dir, options, Arc::new(AtomicU64::new(0)), &mut |what| panic!("{what}")).unwrap();
    let mut keys: Vec<String> = found.into_iter().map(|(key, _)| String::from_utf8(key).unwrap()).collect();
    keys.sort();
    keys
}

/// A segment that was full by plan was removed with the last record in it that counted, while other records were still on their way to it.
#[test]
fn records_were_lost_that_were_on_their_way_to_a_segment_that_was_removed() {
    let value = vec![7; BYTES];
    for round in 0..300 {
        let dir = tempfile::tempdir().unwrap();
        let (log, _) =
            Log::open(dir.path(), OPTIONS, Arc::new(AtomicU64::new(0)), &mut |what| panic!("{what}")).unwrap();
        let first = append(&log, &value, &["first"]);
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                append(&log, &value, &["a", "b", "c", "d"]);
            });
            both.wait();
            // At another moment each time.
            (0..round * 100).for_each(|_| std::hint::spin_loop());
            first.iter().for_each(|location| log.forget(location));
        });
        assert_eq!(found(dir.path()), ["a", "b", "c", "d"], "round {round}");
    }
}

#[test]
fn what_could_not_be_written_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let (log, _) = Log::open(dir.path(), OPTIONS, Arc::new(AtomicU64::new(0)), &mut |what| panic!("{what}")).unwrap();
    let value = vec![7; BYTES];
    append(&log, &value, &["first"]);
    let live = log.live();
    assert!(live > 0);
    // A folder stands where the next segment would be made.
    std::fs::create_dir(dir.path().join("segment_1.log")).unwrap();
    let piece = [Piece { base: value.as_ptr().cast_mut(), len: value.len() }];
    let items: Vec<Item<'_>> =
        ["a", "b", "c", "d"].iter().map(|key| Item { key: key.as_bytes(), pieces: &piece }).collect();
    // SAFETY: the value lives through the call.
    assert!(unsafe { log.append(&items) }.is_err());
    assert_eq!(log.live(), live, "none of them counts");
    std::fs::remove_dir(dir.path().join("segment_1.log")).unwrap();
    append(&log, &value, &["a", "b", "c", "d"]);
    assert_eq!(found(dir.path()), ["a", "b", "c", "d", "first"]);
}
