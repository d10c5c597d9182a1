//! A storage plugin that keeps KV pages in a redb database: one file, transactions, no server.

use std::collections::HashMap;
use std::fs::{DirBuilder, OpenOptions};
use std::io::ErrorKind as IoKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, ErrorKind, Exists, Get, Health, HealthState, Host, LogLevel,
    MetricKind, NoLinker, Open, Page, PageKey, PageStatus, Remove, Result, Set, export_plugin,
};
use redb::{
    Database, Durability, ReadableDatabase, ReadableTable, Table, TableDefinition, TableError, TableHandle,
    TransactionError, WriteTransaction,
};
use serde::Deserialize;

/// The keys below `storage.redb`; the schema at the end of this file says the same in JSON Schema.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    path: PathBuf,
    #[serde(default = "ten_gib")]
    max_bytes: u64,
    #[serde(default = "sixty_four_mib")]
    cache_bytes: usize,
    #[serde(default = "yes")]
    sync: bool,
}

fn ten_gib() -> u64 {
    10 << 30
}

fn sixty_four_mib() -> usize {
    64 << 20
}

fn yes() -> bool {
    true
}

/// Lengths of stored pages. A table of its own, so that asking for a page does not read the page.
type Index<'a> = TableDefinition<'a, PageKey, u64>;
/// Bytes of stored pages.
type Pages<'a> = TableDefinition<'a, PageKey, &'static [u8]>;
/// Pages and bytes of each namespace, written in the same transactions as the pages.
const USAGE: TableDefinition<'static, &str, (u64, u64)> = TableDefinition::new("usage");

/// The name of a pool's table of a kind, `index` or `pages`.
fn table(namespace: &str, pool: &str, kind: &str) -> String {
    format!("{namespace}/{pool}/{kind}")
}

/// One instance: what it keeps belongs to one worker, so to one namespace.
struct Store {
    database: Arc<Database>,
    namespace: String,
    max_bytes: u64,
    sync: bool,
    host: Host,
}

/// Databases that instances of this process have open, by path: redb opens a file once, and an operator who replaces a backend has two
/// instances for a while.
static DATABASES: Mutex<Option<HashMap<PathBuf, Weak<Database>>>> = Mutex::new(None);

fn open_database(open: &Open<'_>, config: &Config) -> Result<Arc<Database>> {
    let wrong = |error: std::io::Error| {
        let key = format!("storage.{}.path", open.instance_name());
        Error::new(ErrorKind::InvalidConfig, format!("{key}: {}: {error}", config.path.display()))
    };
    // Pages hold what people wrote: nobody else may read them.
    if let Some(folder) = config.path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(wrong)?;
    }
    OpenOptions::new().append(true).create(true).mode(0o600).open(&config.path).map_err(wrong)?;
    let path = config.path.canonicalize().map_err(wrong)?;
    let patience = Instant::now() + Duration::from_secs(2);
    loop {
        open.call().check()?;
        let mut databases = DATABASES.lock().unwrap_or_else(PoisonError::into_inner);
        let databases = databases.get_or_insert_default();
        if let Some(database) = databases.get(&path).and_then(Weak::upgrade) {
            return Ok(database);
        }
        match create(open, &path, config.cache_bytes) {
            Ok(database) => {
                let database = Arc::new(database);
                databases.insert(path, Arc::downgrade(&database));
                return Ok(database);
            }
            // A file of somebody else: redb has looked for its mark, also in a short file, and has written nothing.
            Err(redb::DatabaseError::Storage(redb::StorageError::Io(error))) if error.kind() == IoKind::InvalidData => {
                return Err(wrong(error));
            }
            // The last instance may be closing it at this moment.
            Err(redb::DatabaseError::DatabaseAlreadyOpen) if Instant::now() < patience => {}
            Err(error) => return Err(fault(error)),
        }
        sleep(Duration::from_millis(10));
    }
}

fn create(open: &Open<'_>, path: &Path, cache_bytes: usize) -> Result<Database, redb::DatabaseError> {
    let host = open.host();
    let deadline = open.call().remaining().map(|left| Instant::now() + left);
    Database::builder()
        .set_cache_size(cache_bytes)
        .set_repair_callback(move |repair| {
            host.log(LogLevel::Warn, "repair", &format!("{:.0}% repaired after a crash", repair.progress() * 100.0));
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                repair.abort();
            }
        })
        .create(path)
}

/// What went wrong in redb, in the words of the boundary.
fn fault(error: impl Into<redb::Error>) -> Error {
    let error = error.into();
    match &error {
        redb::Error::Io(io) if io.kind() == IoKind::StorageFull => Error::new(ErrorKind::NoSpace, error.to_string()),
        redb::Error::Corrupted(_) => Error::new(ErrorKind::Corrupt, error.to_string()),
        redb::Error::DatabaseAlreadyOpen => {
            Error::new(ErrorKind::Unavailable, "another process has the database open").retryable()
        }
        _ => Error::new(ErrorKind::Unavailable, error.to_string()),
    }
}

/// Pages and bytes of this namespace, and how many bytes more the store may take.
struct Usage {
    pages: u64,
    bytes: u64,
    room: u64,
    changed: bool,
}

impl Store {
    /// redb has one writer at a time, and its own `begin_write` waits for ever; a call of ours has a deadline and may be cancelled.
    fn begin_write(&self, call: &Call<'_>) -> Result<WriteTransaction> {
        loop {
            call.check()?;
            match self.database.try_begin_write() {
                Ok(mut write) => {
                    // Without it the first open after a crash reads the whole file.
                    write.set_quick_repair(true);
                    if !self.sync {
                        write.set_durability(Durability::None).map_err(|error| fault(redb::Error::from(error)))?;
                    }
                    return Ok(write);
                }
                Err(TransactionError::WouldBlock) => sleep(Duration::from_millis(1)),
                Err(error) => return Err(fault(error)),
            }
        }
    }

    fn usage(&self, table: &impl ReadableTable<&'static str, (u64, u64)>) -> Result<Usage> {
        let mut usage = Usage { pages: 0, bytes: 0, room: self.max_bytes, changed: false };
        for row in table.iter().map_err(fault)? {
            let (namespace, figures) = row.map_err(fault)?;
            let (pages, bytes) = figures.value();
            usage.room = usage.room.saturating_sub(bytes);
            if namespace.value() == self.namespace {
                (usage.pages, usage.bytes) = (pages, bytes);
            }
        }
        Ok(usage)
    }

    /// Runs `body` for every page in one transaction, and tells the statuses when it is committed.
    fn write<M>(
        &self,
        batch: Batch<'_, M>,
        body: impl Fn(&WriteTransaction, &mut Usage, &Page<'_, M>) -> Result<PageStatus>,
    ) -> Result<()> {
        let call = *batch.call();
        let write = self.begin_write(&call)?;
        let mut usage = self.usage(&write.open_table(USAGE).map_err(fault)?)?;
        let mut done = Vec::with_capacity(batch.len());
        for page in batch.into_pages() {
            // Whoever leaves here drops the transaction: nothing of it happens.
            call.check()?;
            let status = body(&write, &mut usage, &page)?;
            done.push((page, status));
        }
        if usage.changed {
            let mut table = write.open_table(USAGE).map_err(fault)?;
            table.insert(self.namespace.as_str(), (usage.pages, usage.bytes)).map_err(fault)?;
            drop(table);
            self.commit(write)?;
        }
        // Not before: a page that is said to be stored must be there, whatever happens next.
        done.into_iter().for_each(|(page, status)| page.finish(status));
        Ok(())
    }

    fn commit(&self, write: WriteTransaction) -> Result<()> {
        let start = Instant::now();
        write.commit().map_err(fault)?;
        self.host.metric(MetricKind::Observe, "commit_seconds", "", start.elapsed().as_secs_f64());
        Ok(())
    }

    fn index<'t>(&self, write: &'t WriteTransaction, pool: &str) -> Result<Table<'t, PageKey, u64>> {
        write.open_table(Index::new(&table(&self.namespace, pool, "index"))).map_err(fault)
    }

    fn pages<'t>(&self, write: &'t WriteTransaction, pool: &str) -> Result<Table<'t, PageKey, &'static [u8]>> {
        write.open_table(Pages::new(&table(&self.namespace, pool, "pages"))).map_err(fault)
    }
}

impl Backend for Store {
    type Linker = NoLinker<Self>;

    fn open(open: &Open<'_>) -> Result<Self> {
        let config: Config = open.config()?;
        let database = open_database(open, &config)?;
        let namespace: String = open.identity().namespace.iter().map(|byte| format!("{byte:02x}")).collect();
        let store = Store { database, namespace, max_bytes: config.max_bytes, sync: config.sync, host: open.host() };
        // Reading is easier when the table is always there.
        let write = store.begin_write(open.call())?;
        let usage = store.usage(&write.open_table(USAGE).map_err(fault)?)?;
        write.commit().map_err(fault)?;
        let message = format!("{}: {} pages of this model", config.path.display(), usage.pages);
        store.host.log(LogLevel::Info, "open", &message);
        Ok(store)
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let read = self.database.begin_read().map_err(fault)?;
        let keys = exists.keys();
        let pools: Vec<_> = exists.pools().iter().map(|query| query.pool.clone()).collect();
        for (number, pool) in pools.iter().enumerate() {
            exists.call().check()?;
            let index = match read.open_table(Index::new(&table(&self.namespace, pool.name(), "index"))) {
                Err(TableError::TableDoesNotExist(_)) => continue,
                index => index.map_err(fault)?,
            };
            for (position, key) in keys.iter().enumerate() {
                let length = index.get(key).map_err(fault)?.map(|length| length.value());
                if length == Some(pool.page_bytes()) {
                    exists.set(number, position, PageStatus::Ok);
                }
            }
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        let read = self.database.begin_read().map_err(fault)?;
        for page in batch.into_pages() {
            call.check()?;
            let index = match read.open_table(Index::new(&table(&self.namespace, page.pool().name(), "index"))) {
                Err(TableError::TableDoesNotExist(_)) => {
                    page.finish(PageStatus::Missing);
                    continue;
                }
                index => index.map_err(fault)?,
            };
            if index.get(page.key()).map_err(fault)?.is_none() {
                page.finish(PageStatus::Missing);
            } else if page.is_empty() {
                page.finish(PageStatus::Ok);
            } else {
                let name = table(&self.namespace, page.pool().name(), "pages");
                let pages = read.open_table(Pages::new(&name)).map_err(fault)?;
                match pages.get(page.key()).map_err(fault)? {
                    Some(bytes) => page.fill(bytes.value()),
                    None => page.finish(PageStatus::Corrupt),
                }
            }
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        self.write(batch, |write, usage, page| {
            let length = page.len() as u64;
            let mut index = self.index(write, page.pool().name())?;
            let before = index.get(page.key()).map_err(fault)?.map(|length| length.value());
            if before == Some(length) {
                return Ok(PageStatus::Ok);
            }
            if length > usage.room {
                return Ok(PageStatus::Refused);
            }
            index.insert(page.key(), length).map_err(fault)?;
            if length > 0 {
                let mut pages = self.pages(write, page.pool().name())?;
                let mut room = pages.insert_reserve(page.key(), page.len()).map_err(fault)?;
                let mut rest = room.as_mut();
                for piece in 0..page.piece_count() {
                    let bytes = page.piece_bytes(piece)?;
                    let (head, tail) = rest.split_at_mut(bytes.len());
                    head.copy_from_slice(bytes);
                    rest = tail;
                }
            }
            usage.pages += u64::from(before.is_none());
            usage.bytes = usage.bytes + length - before.unwrap_or(0).min(usage.bytes);
            usage.room -= length;
            usage.changed = true;
            Ok(PageStatus::Ok)
        })
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        self.write(batch, |write, usage, page| {
            let mut index = self.index(write, page.pool().name())?;
            let Some(length) = index.remove(page.key()).map_err(fault)?.map(|length| length.value()) else {
                return Ok(PageStatus::Missing);
            };
            self.pages(write, page.pool().name())?.remove(page.key()).map_err(fault)?;
            usage.pages = usage.pages.saturating_sub(1);
            usage.bytes = usage.bytes.saturating_sub(length);
            usage.room = usage.room.saturating_add(length);
            usage.changed = true;
            Ok(PageStatus::Ok)
        })
    }

    fn clear(&self, call: &Call<'_>, scope: ClearScope) -> Result<()> {
        let write = self.begin_write(call)?;
        let tables: Vec<_> = write.list_tables().map_err(fault)?.collect();
        for table in tables {
            call.check()?;
            let ours = table.name().strip_prefix(&self.namespace).is_some_and(|rest| rest.starts_with('/'));
            if ours || scope == ClearScope::Everything {
                write.delete_table(table).map_err(fault)?;
            }
        }
        write.open_table(USAGE).map_err(fault)?.remove(self.namespace.as_str()).map_err(fault)?;
        self.commit(write)
    }

    fn stats(&self, _call: &Call<'_>) -> Result<Stats> {
        let read = self.database.begin_read().map_err(fault)?;
        let usage = self.usage(&read.open_table(USAGE).map_err(fault)?)?;
        Ok(Stats {
            pages: usage.pages,
            bytes_used: usage.bytes,
            bytes_total: self.max_bytes,
            failures: 0,
            get_mean_ns: 0,
            set_mean_ns: 0,
        })
    }

    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        let degraded = |reason: String| Ok(Health { state: HealthState::Degraded, reason });
        // After an error of the disk redb refuses to write until the file is opened anew.
        if let Err(error) = self.database.try_begin_write()
            && !matches!(error, TransactionError::WouldBlock)
        {
            return degraded(format!("it can't write: {error}; attach it anew when the cause is gone"));
        }
        let read = self.database.begin_read().map_err(fault)?;
        let usage = self.usage(&read.open_table(USAGE).map_err(fault)?)?;
        if usage.room < self.max_bytes / 100 {
            return degraded("less than 1% of max_bytes is free: it takes few new pages, or none".into());
        }
        Ok(Health::ok())
    }

    fn flush(&self, call: &Call<'_>) -> Result<()> {
        let mut write = self.begin_write(call)?;
        write.set_durability(Durability::Immediate).map_err(|error| fault(redb::Error::from(error)))?;
        self.commit(write)
    }

    fn close(&self, call: &Call<'_>) -> Result<()> {
        if self.sync { Ok(()) } else { self.flush(call) }
    }
}

export_plugin! {
    backend: Store,
    name: "redb",
    capabilities: Capabilities {
        remove: true,
        clear_namespace: true,
        clear_everything: true,
        durable: true,
        logical_pools: true,
        concurrency: 4,
        ..Capabilities::NONE
    },
    config_schema: r#"{
        "type": "object",
        "properties": {
            "path": {
                "type": "string", "minLength": 1,
                "description": "File of the database; it is made when it is not there"
            },
            "max_bytes": {
                "type": "integer", "minimum": 1, "default": 10737418240,
                "description": "Bytes of pages that it keeps, of all models together; the file may be twice as big"
            },
            "cache_bytes": {
                "type": "integer", "minimum": 0, "default": 67108864,
                "description": "Bytes of memory that redb may use as a cache"
            },
            "sync": {
                "type": "boolean", "default": true,
                "description": "Wait for the disk at each call; without it, a killed process loses what is not flushed"
            }
        },
        "required": ["path"],
        "additionalProperties": false
    }"#,
    check_config: r#"{"path": "{scratch}/pages.redb"}"#,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use kvdock_plugin_api::conformance::Suite;
    use kvdock_plugin_api::mock::{
        Instance, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key, table_of,
    };

    use super::*;

    /// Eight pages of two pieces each, and the host's seal.
    fn pool() -> MockPool {
        MockPool::new(PoolSpec::bytes(0, "kv", 8, &[4096, 4096]).with_seal(64))
    }

    fn attach(folder: &Path, more: &str, model: &str, pool: &MockPool) -> Result<Instance> {
        let config = format!(r#"{{"path": "{}/pages.redb"{more}}}"#, folder.display());
        MockHost::new().attach(table_of(kvdock_plugin_entry)?, &config, &identity(model), &[pool])
    }

    #[test]
    fn it_keeps_the_contract() {
        Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).run().assert_passed();
    }

    #[test]
    fn pages_are_there_after_a_restart() -> Result<()> {
        let (folder, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
        let store = attach(folder.path(), "", "a model", &pool)?;
        pool.fill(3, 42);
        assert!(store.set(&options, &[Part::new(&pool, &[key(1)], &[3])]).all_ok());
        store.close()?;

        let store = attach(folder.path(), "", "a model", &pool)?;
        assert_eq!(store.exists(&options, &[key(1), key(2)], &[Query::of(&pool)])?.longest(), 1);
        let got = store.get(&options, &[Part::new(&pool, &[key(1), key(2)], &[5, 6])]);
        assert_eq!(got.statuses, [[PageStatus::Ok, PageStatus::Missing]]);
        assert!(pool.holds(5, 42));
        assert_eq!(store.stats()?.bytes_used, pool.page_bytes() as u64);
        store.close()
    }

    #[test]
    fn another_model_sees_and_clears_its_own_pages_only() -> Result<()> {
        let (folder, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
        // Both at once, as when an operator replaces a backend.
        let one = attach(folder.path(), "", "one", &pool)?;
        let two = attach(folder.path(), "", "two", &pool)?;
        assert!(one.set(&options, &[Part::new(&pool, &[key(1)], &[0])]).all_ok());
        assert_eq!(two.exists(&options, &[key(1)], &[Query::of(&pool)])?.longest(), 0);
        two.clear(&options, ClearScope::Namespace)?;
        assert_eq!(one.stats()?.pages, 1);
        two.clear(&options, ClearScope::Everything)?;
        assert_eq!(one.exists(&options, &[key(1)], &[Query::of(&pool)])?.longest(), 0);
        Ok(())
    }

    #[test]
    fn a_full_store_refuses_and_says_so() -> Result<()> {
        let (folder, pool) = (tempfile::tempdir().unwrap(), pool());
        let store = attach(folder.path(), r#", "max_bytes": 10000"#, "a model", &pool)?;
        let set = store.set(&Options::default(), &[Part::new(&pool, &[key(1), key(2)], &[0, 1])]);
        assert_eq!(set.statuses, [[PageStatus::Ok, PageStatus::Refused]]);
        let removed = store.remove(&Options::default(), &[Part::new(&pool, &[key(1), key(9)], &[])]);
        assert_eq!(removed.statuses, [[PageStatus::Ok, PageStatus::Missing]]);
        assert!(store.set(&Options::default(), &[Part::new(&pool, &[key(2)], &[1])]).all_ok());
        Ok(())
    }

    #[test]
    fn a_file_of_somebody_else_is_refused_and_stays() {
        let (folder, pool) = (tempfile::tempdir().unwrap(), pool());
        let path = folder.path().join("pages.redb");
        for text in ["x", &"a letter\n".repeat(9000)] {
            std::fs::write(&path, text).unwrap();
            let error = attach(folder.path(), "", "a model", &pool).err().unwrap();
            assert_eq!(error.kind, ErrorKind::InvalidConfig);
            assert!(error.message.contains(".path: ") && error.message.contains("redb"), "{}", error.message);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_writer_waits_for_another_no_longer_than_its_deadline() -> Result<()> {
        let (folder, pool) = (tempfile::tempdir().unwrap(), pool());
        let store = attach(folder.path(), "", "a model", &pool)?;
        let path = folder.path().join("pages.redb").canonicalize().unwrap();
        let database = DATABASES.lock().unwrap().as_ref().unwrap()[&path].upgrade().unwrap();
        let other = database.begin_write().unwrap();
        let late = Options { deadline: Some(Duration::from_millis(50)), ..Options::default() };
        let set = store.set(&late, &[Part::new(&pool, &[key(1)], &[0])]);
        assert_eq!(set.result.unwrap_err().kind, ErrorKind::TimedOut);
        let cancelled = Options { cancel: Some(&AtomicU32::new(1)), ..Options::default() };
        let set = store.set(&cancelled, &[Part::new(&pool, &[key(1)], &[0])]);
        assert_eq!(set.result.unwrap_err().kind, ErrorKind::Cancelled);
        drop(other);
        assert_eq!(store.stats()?.pages, 0);
        Ok(())
    }

    #[test]
    fn without_sync_pages_live_until_the_close_and_then_longer() -> Result<()> {
        let (folder, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
        let store = attach(folder.path(), r#", "sync": false"#, "a model", &pool)?;
        assert!(store.set(&options, &[Part::new(&pool, &[key(1)], &[0])]).all_ok());
        store.close()?;
        let store = attach(folder.path(), "", "a model", &pool)?;
        assert_eq!(store.stats()?.pages, 1);
        Ok(())
    }
}
