//! Segment files that real programs have written.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kvdock_plugin_umbp::segment::record::{self, HEADER, Version};
use kvdock_plugin_umbp::segment::{Buffer, Location, Log, Options};
use sha2::{Digest, Sha256};

const OPTIONS: Options = Options { segment: 65536, strict: false, direct: true, verify: true, follower: false };

fn captured(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(name)
}

/// A copy, for opening repairs what it finds.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(captured(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

type Found = Vec<(Vec<u8>, Location)>;

fn open(dir: &Path, options: Options) -> (Log, Found, Vec<String>) {
    let mut told = Vec::new();
    let (log, found) = Log::open(dir, options, Arc::new(AtomicU64::new(0)), &mut |what| told.push(what)).unwrap();
    (log, found, told)
}

fn value(key: &[u8], at: &Location) -> Result<Vec<u8>, String> {
    let mut buffer = Buffer::new();
    let len = at.len() as usize;
    buffer.reserve(len);
    let aligned = at.version == Version::Three;
    at.segment.read(&mut buffer.bytes_mut()[..len], at.offset, aligned).map_err(|error| error.to_string())?;
    record::open(&buffer.bytes()[..len], key).map(|(_, value)| value.to_vec())
}

fn key(name: &str) -> Vec<u8> {
    match name {
        "hash" => format!("{}_0_k", "0123456789abcdef".repeat(4)).into_bytes(),
        "300x" => vec![b'x'; 300],
        "4064x" => vec![b'x'; 4064],
        "4065y" => vec![b'y'; 4065],
        other => other.as_bytes().to_vec(),
    }
}

fn written_by_1(key: &[u8], len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 131 + key.len() * 7 + usize::from(key[0])) & 0xff) as u8).collect()
}

fn written_by_3(key: &[u8], len: usize) -> Vec<u8> {
    let mut value = Vec::new();
    for n in 0u32.. {
        if value.len() >= len {
            break;
        }
        value.extend(Sha256::digest([key, &n.to_le_bytes()].concat()));
    }
    value.truncate(len);
    value
}

/// File, offset, key, bytes, generation.
type Row = (u64, u64, &'static str, usize, u64);

const ONE: [Row; 8] = [
    (0, 0, "alpha", 1, 1),
    (0, 38, "beta_0_k", 4096, 2),
    (0, 4174, "beta_0_v", 4097, 3),
    (0, 8311, "hash", 16384, 4),
    (0, 24795, "300x", 512, 5),
    (0, 25639, "mid", 10000, 6),
    (1, 0, "w1", 30000, 7),
    (1, 30034, "w2", 30000, 8),
];
const THREE: [Row; 7] = [
    (0, 0, "alpha", 1, 1),
    (0, 8192, "beta_0_k", 4096, 2),
    (0, 16384, "beta_0_v", 4097, 3),
    (0, 28672, "hash", 16384, 4),
    (0, 49152, "4064x", 512, 5),
    (1, 0, "4065y", 512, 6),
    (1, 12288, "mid", 10000, 7),
];

fn expected(name: &str, key: &[u8], len: usize) -> Vec<u8> {
    if name == "seg-v1" { written_by_1(key, len) } else { written_by_3(key, len) }
}

#[test]
fn captured_segments_are_read_record_by_record() {
    for (name, rows) in [("seg-v1", &ONE[..]), ("seg-v3", &THREE[..]), ("seg-v3-nocrc", &THREE[5..])] {
        let dir = copy(name);
        let (_log, found, told) = open(dir.path(), OPTIONS);
        assert_eq!(told, [] as [String; 0], "{name}");
        assert_eq!(found.len(), rows.len(), "{name}");
        for ((found_key, at), (segment, offset, row_key, len, generation)) in found.iter().zip(rows) {
            let row_key = key(row_key);
            assert_eq!(*found_key, row_key, "{name} {generation}");
            assert_eq!((at.segment.id, at.offset, at.generation), (*segment, *offset, *generation), "{name}");
            let value = value(&row_key, at).unwrap();
            assert!(value == expected(name, &row_key, *len), "{name} {generation}");
        }
    }
}

#[test]
fn every_flipped_bit_in_captured_records_is_noticed() {
    for (name, rows) in [("seg-v1", &ONE[..]), ("seg-v3", &THREE[..])] {
        for (segment, offset, row_key, len, generation) in rows {
            let file = std::fs::read(captured(name).join(format!("segment_{segment}.log"))).unwrap();
            let row_key = key(row_key);
            let version = if name == "seg-v1" { Version::One } else { Version::Three };
            let bytes = record::record_len(version, row_key.len() as u32, *len as u32) as usize;
            let mut one = file[*offset as usize..*offset as usize + bytes].to_vec();
            let value_at = record::value_at(version, row_key.len() as u32) as usize;
            let expected = expected(name, &row_key, *len);
            for bit in 0..bytes * 8 {
                let at = bit / 8;
                one[at] ^= 1 << (bit % 8);
                let opened = record::open(&one, &row_key);
                // What says nothing about the value: the generation, and padding, whose bytes are nobody's.
                let says_nothing = (24..HEADER).contains(&at)
                    || (HEADER + row_key.len()..value_at).contains(&at)
                    || at >= value_at + len;
                match opened {
                    Ok((_, value)) => {
                        assert!(says_nothing, "{name} {generation}: bit {bit} was not noticed");
                        assert!(value == expected, "{name} {generation}: bit {bit} changes the value");
                    }
                    // A generation that can't be is noticed as well.
                    Err(_) => assert!(!says_nothing || at == HEADER - 1, "{name} {generation}: bit {bit}"),
                }
                one[at] ^= 1 << (bit % 8);
            }
        }
    }
}

#[test]
fn a_flipped_bit_in_a_header_gives_no_wrong_byte_and_hides_little() {
    for (name, rows) in [("seg-v1", &ONE[..]), ("seg-v3", &THREE[..])] {
        let dir = copy(name);
        for (segment, offset, ..) in rows {
            let path = dir.path().join(format!("segment_{segment}.log"));
            let good = std::fs::read(&path).unwrap();
            for bit in 0..HEADER * 8 {
                let mut bad = good.clone();
                bad[*offset as usize + bit / 8] ^= 1 << (bit % 8);
                std::fs::write(&path, &bad).unwrap();
                // One that follows repairs nothing and keeps nobody out, and finds the same.
                let (_log, found, _) = open(dir.path(), Options { follower: true, ..OPTIONS });
                let mut right = 0;
                for (_, _, row_key, len, _) in rows {
                    let row_key = key(row_key);
                    let Some((_, at)) = found.iter().rfind(|(found, _)| *found == row_key) else { continue };
                    if let Ok(value) = value(&row_key, at) {
                        assert!(value == expected(name, &row_key, *len), "{name}: bit {bit} of the header at {offset}");
                        right += 1;
                    }
                }
                // A length that is too large takes in records behind. Those before are read in any case.
                let least = rows.iter().filter(|row| row.0 != *segment || row.1 < *offset).count();
                assert!(right >= least, "{name}: bit {bit} of the header at {offset}: {right} records are left");
            }
            std::fs::write(&path, &good).unwrap();
        }
    }
}
