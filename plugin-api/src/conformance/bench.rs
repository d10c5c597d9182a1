//! What a rule works with.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::calls::Watch;
use super::declared::with_scratch;
use super::store::Store;
use super::{Check, Rule, Stop, Subject, fail};
use crate::mock::{MockHost, MockPool, identity};
use crate::{CacheMode, Capabilities, Identity, Result};

/// One rule's view: the plugin, a scratch folder of its own, a host that records.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) subject: Subject,
    pub(crate) rule: &'static Rule,
    pub(crate) scratch: std::path::PathBuf,
    pub(crate) watch: Arc<Watch>,
    pub(crate) host: MockHost,
}

impl Bench {
    pub(crate) fn new(subject: &Subject, rule: &'static Rule, scratch: &Path, watch: Arc<Watch>) -> Bench {
        Bench { subject: subject.clone(), rule, scratch: scratch.to_owned(), watch, host: MockHost::new() }
    }

    /// What the note says.
    pub(crate) fn declared(&self) -> &Capabilities {
        &self.subject.declared.capabilities
    }

    /// The configuration of this rule, with its scratch folder.
    pub(crate) fn config(&self) -> Value {
        with_scratch(&self.subject.config, &self.scratch.to_string_lossy())
    }

    /// Who the worker is that rules speak for, unless they say otherwise.
    pub(crate) fn identity(&self) -> Identity {
        identity("conformance")
    }

    /// Opens an instance; the inner result is the plugin's answer.
    pub(crate) fn try_open(&self, config: &Value, identity: &Identity, mode: CacheMode) -> Check<Result<Store>> {
        Store::open(self, &config.to_string(), identity, mode)
    }

    /// Opens an instance with the configuration of this rule.
    pub(crate) fn open(&self) -> Check<Store> {
        self.open_as(&self.identity())
    }

    /// Opens an instance for another worker.
    pub(crate) fn open_as(&self, identity: &Identity) -> Check<Store> {
        self.open_mode(identity, CacheMode::Hierarchical)
    }

    /// Opens an instance that the host will use by a face.
    pub(crate) fn open_mode(&self, identity: &Identity, mode: CacheMode) -> Check<Store> {
        let store = match self.try_open(&self.config(), identity, mode)? {
            Ok(store) => store,
            Err(error) => return fail(format!("open takes the configuration {}", self.config()), error.to_string()),
        };
        if let Some(missing) = self.rule.needs.iter().find(|needed| store.capabilities.raw().flags & needed.raw() == 0)
        {
            return Err(Stop::Skip(format!("this instance does not have the capability {missing}")));
        }
        Ok(store)
    }

    /// Opens an instance, registers the pools (the first is the anchor) and says that they are ready.
    pub(crate) fn attach(&self, pools: &[&MockPool]) -> Check<Store> {
        self.attach_as(&self.identity(), pools)
    }

    /// As [`Bench::attach`], for another worker.
    pub(crate) fn attach_as(&self, identity: &Identity, pools: &[&MockPool]) -> Check<Store> {
        let store = self.open_as(identity)?;
        store.register_all(pools)?;
        Ok(store)
    }
}
