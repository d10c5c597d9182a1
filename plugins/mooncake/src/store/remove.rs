//! Removing pages.

use kvdock_plugin_api::{Batch, Call, ClearScope, Error, ErrorKind, LogLevel, PageStatus, Remove, Result};

use super::Store;
use super::items::Use;
use crate::member::{RPC_TIME, error_of};
use crate::rpc::RpcError;
use crate::wire::{ErrorCode, rpc};

impl Store {
    /// Removes the pages of a batch, also those that somebody may be reading: their lease does not keep what is corrupt.
    pub fn remove(&self, batch: &Batch<'_, Remove>) -> Result<()> {
        let call = *batch.call();
        call.check()?;
        let items = self.items(batch.transfers(), Use::Names)?;
        if items.list.is_empty() {
            items.settle();
            return Ok(());
        }
        let names: Vec<&str> = items.list.iter().map(|item| item.name.as_str()).collect();
        let limit = Store::limit(&call).at_most(RPC_TIME);
        // The master removes nothing that is just being stored.
        let claim = self.member.under_way.claim(names.iter().copied(), &limit);
        let _claim = claim.map_err(|stop| error_of(&RpcError::stopped(stop)))?;
        let _removing = self.member.under_way.remove();
        let request = (names, true, self.member.tenant.as_str());
        let removed =
            self.member.master.call::<rpc::BatchRemove>(&request, &limit).map_err(|error| error_of(&error))?;
        for (item, removed) in items.list.iter().zip(removed) {
            let status = match removed {
                Ok(()) => PageStatus::Ok,
                Err(ErrorCode::OBJECT_NOT_FOUND) => PageStatus::Missing,
                Err(_) => PageStatus::Failed,
            };
            item.finish(status);
        }
        items.settle();
        Ok(())
    }

    /// Removes everything of the namespace.
    pub fn clear(&self, call: &Call<'_>, scope: ClearScope) -> Result<()> {
        if scope != ClearScope::Namespace {
            // Others keep their objects in the same store.
            return Err(Error::unsupported("clearing what is not of its namespace"));
        }
        let Some(names) = self.names.all() else {
            let text = "clearing: with key_scheme = \"sglang\" the names of objects do not say whose they are";
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        let limit = Store::limit(call);
        let request = (names.as_str(), true, self.member.tenant.as_str());
        let _removing = self.member.under_way.remove();
        let removed =
            self.member.master.call::<rpc::RemoveByRegex>(&request, &limit).map_err(|error| error_of(&error))?;
        match removed {
            Ok(count) => {
                self.member.host.log(LogLevel::Info, "store", &format!("{count} objects were removed"));
                Ok(())
            }
            Err(ErrorCode::OBJECT_NOT_FOUND) => Ok(()),
            Err(code) => {
                let text = format!("master {}: {code}", self.member.master.address());
                Err(Error::new(ErrorKind::Unavailable, text).retryable())
            }
        }
    }
}
