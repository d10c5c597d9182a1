use std::fs::OpenOptions;

use super::super::record::{Checksum, record_len};
use super::*;

/// A header of a record that counts.
fn header(key_len: u32, value_len: u32, crc: u32) -> Header {
    Header { version: Version::Three, committed: true, checked: true, key_len, value_len, crc, generation: 1 }
}

/// A whole record.
fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut sum = Checksum::new(Version::Three);
    sum.add(key);
    sum.add(value);
    let header = header(key.len() as u32, value.len() as u32, sum.sum());
    let mut out = header.encode().to_vec();
    out.extend(key);
    out.resize(header.value_at() as usize, 0);
    out.extend(value);
    out.resize(header.record_len() as usize, 0);
    out
}

fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// Bytes that this thread has read by system calls so far.
fn bytes_read() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().trim().parse().unwrap()
}

#[test]
fn records_behind_damage_are_found_whatever_their_lengths() {
    let mut random = fastrand::Rng::with_seed(8);
    let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| random.u8(..)).collect() };
    for (key, value) in [
        (1, 0),
        (1, 1),
        (64, 4096),
        (64, 4095),
        (4064, 10_000),
        (4065, 0),
        (4095, 70_000),
        (4096, 3),
        (5000, 4097),
        (1 << 20, 3 << 20),
    ] {
        let (key, value) = (bytes(key), bytes(value));
        let good = record(&key, &value);
        for junk in [1, 4096, 20_000] {
            let mut file = bytes(junk);
            file.resize(junk.next_multiple_of(BLOCK as usize), 7);
            let begin = file.len() as u64;
            file.extend(&good);
            let end = file.len() as u64;
            // One more, of which a bit is wrong, is none.
            let mut bad = good.clone();
            let at = HEADER + key.len() / 2;
            bad[at] ^= 4;
            file.extend([0; BLOCK as usize]);
            file.extend(&bad);
            let found = scan(&file_of(&file), 0, file.len() as u64).unwrap();
            assert_eq!(found.records.len(), 1, "a key of {} bytes, a value of {}", key.len(), value.len());
            assert_eq!((found.records[0].offset, &found.records[0].key), (begin, &key));
            assert_eq!((found.damaged.len(), found.end), (1, end));
            assert!(found.tail.is_some());
        }
    }
}

#[test]
fn the_work_is_no_more_than_some_times_the_file_whatever_it_claims() {
    let len: u64 = 24 << 20;
    let blocks = len / BLOCK;
    // Each block says that it is a record that goes on to the end of the file: with a short key, with the longest one, with either in turn.
    for keys in [[64, 64], [1 << 20, 1 << 20], [4000, 1 << 20]] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file.write_all_at(b"none", 0).unwrap();
        for block in 1..blocks {
            let at = block * BLOCK;
            let key_len = keys[block as usize % 2];
            let room = (len - at).saturating_sub(record_len(Version::Three, key_len, 0));
            let bytes = header(key_len, u32::try_from(room).unwrap(), 0x1234_5678).encode();
            file.write_all_at(&bytes, at).unwrap();
        }
        let before = bytes_read();
        let found = scan(&file, 0, len).unwrap();
        let read = bytes_read() - before;
        assert!(found.records.is_empty() && found.damaged.is_empty() && found.tail.is_some());
        assert_eq!(found.end, 0);
        assert!(read < 6 * len, "{read} bytes were read of {len}");
    }
}

#[test]
fn damage_between_all_records_costs_no_more() {
    let one = record(b"key", &[5; 100]);
    let mut file = Vec::new();
    for _ in 0..2000 {
        file.extend([9; BLOCK as usize]);
        file.extend(&one);
    }
    let len = file.len() as u64;
    let file = file_of(&file);
    let before = bytes_read();
    let found = scan(&file, 0, len).unwrap();
    assert_eq!((found.records.len(), found.damaged.len(), found.tail), (2000, 2000, None));
    let read = bytes_read() - before;
    assert!(read < 4 * len, "{read} bytes were read of {len}");
}

#[test]
fn holes_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    let (far, len) = (48u64 << 30, 64u64 << 30);
    if file.set_len(len).is_err() {
        // No such long files here.
        return;
    }
    let good = record(b"far", &[3; 5000]);
    file.write_all_at(&good, far).unwrap();
    let before = bytes_read();
    let found = scan(&file, 0, len).unwrap();
    assert_eq!(found.records.iter().map(|found| found.offset).collect::<Vec<_>>(), [far]);
    assert_eq!((found.end, found.damaged.len(), found.tail.is_some()), (far + good.len() as u64, 1, true));
    let read = bytes_read() - before;
    assert!(read < 64 << 20, "{read} bytes were read");
}
