// Leases: one process works on a key, the others wait for its result.

#include "absl/types/span.h"
#include "cache/plan_cache.h"
#include "cache/row_codec.h"
#include "cache/sqlite_db.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Binds key and owner to the first five slots.
void BindOwned(const Digest& key, const LeaseOwner& owner,
               Statement* statement) {
  statement->BindBlob(1, key.AsBytes());
  statement->BindText(2, owner.boot);
  statement->BindInteger(3, owner.pid);
  statement->BindInteger(4, owner.start_ticks);
  statement->BindInteger(5, owner.token);
}

}  // namespace

absl::StatusOr<bool> PlanCache::IsLeasedToOther(const Digest& key) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT boot, pid, start_ticks, token, expires_unix, "
                         "row_digest FROM lease WHERE key = ?1"));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return false;
  const LeaseColumns columns = {.key = key.AsBytes(),
                                .boot = select.Bytes(0),
                                .pid = select.Integer(1),
                                .start_ticks = select.Integer(2),
                                .token = select.Integer(3),
                                .expires_unix = select.Integer(4)};
  // A damaged claim is none.
  if (Sha256(EncodeRow(columns)).AsBytes() != select.Bytes(5)) return false;
  const LeaseOwner owner = {.boot = std::string(columns.boot),
                            .pid = columns.pid,
                            .start_ticks = columns.start_ticks,
                            .token = columns.token};
  return owner != owner_ && columns.expires_unix > Now() && MayBeAlive(owner);
}

absl::Status PlanCache::DropLease(const Digest& key) {
  ASSIGN_OR_RETURN(Statement remove,
                   database_->Prepare("DELETE FROM lease WHERE key = ?1"));
  remove.BindBlob(1, key.AsBytes());
  return remove.Run();
}

absl::StatusOr<std::vector<bool>> PlanCache::AcquireLeases(
    absl::Span<const Digest> keys, int64_t seconds, size_t limit) {
  RETURN_IF_ERROR(RequireWritable());
  std::vector<bool> claimed(keys.size(), false);
  // Without the write lock first: those who wait for others must not hold up
  // whoever they wait for.
  bool any = false;
  for (const Digest& key : keys) {
    ASSIGN_OR_RETURN(const bool leased, IsLeasedToOther(key));
    any = any || !leased;
    if (any) break;
  }
  if (!any || limit == 0) return claimed;

  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  size_t count = 0;
  for (size_t i = 0; i < keys.size() && count < limit; ++i) {
    const Digest& key = keys[i];
    ASSIGN_OR_RETURN(const bool leased, IsLeasedToOther(key));
    if (leased) continue;
    // Whoever had the key may have finished since the caller looked.
    ASSIGN_OR_RETURN(const bool compiled, ContainsProgram(key));
    if (compiled) continue;
    {
      ASSIGN_OR_RETURN(
          Statement select,
          database_->Prepare("SELECT 1 FROM reject WHERE key = ?1"));
      select.BindBlob(1, key.AsBytes());
      ASSIGN_OR_RETURN(const bool rejected, select.Step());
      if (rejected) continue;
    }
    const LeaseColumns columns = {.key = key.AsBytes(),
                                  .boot = owner_.boot,
                                  .pid = owner_.pid,
                                  .start_ticks = owner_.start_ticks,
                                  .token = owner_.token,
                                  .expires_unix = Now() + seconds};
    const Digest row_digest = Sha256(EncodeRow(columns));
    ASSIGN_OR_RETURN(
        Statement insert,
        database_->Prepare("INSERT OR REPLACE INTO lease (key, boot, pid, "
                           "start_ticks, token, expires_unix, row_digest) "
                           "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)"));
    insert.BindBlob(1, columns.key);
    insert.BindText(2, columns.boot);
    insert.BindInteger(3, columns.pid);
    insert.BindInteger(4, columns.start_ticks);
    insert.BindInteger(5, columns.token);
    insert.BindInteger(6, columns.expires_unix);
    insert.BindBlob(7, row_digest.AsBytes());
    RETURN_IF_ERROR(insert.Run());
    claimed[i] = true;
    ++count;
  }
  RETURN_IF_ERROR(transaction.Commit());
  return claimed;
}

absl::Status PlanCache::RenewLeases(absl::Span<const Digest> keys,
                                    int64_t seconds) {
  RETURN_IF_ERROR(RequireWritable());
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  for (const Digest& key : keys) {
    const LeaseColumns columns = {.key = key.AsBytes(),
                                  .boot = owner_.boot,
                                  .pid = owner_.pid,
                                  .start_ticks = owner_.start_ticks,
                                  .token = owner_.token,
                                  .expires_unix = Now() + seconds};
    const Digest row_digest = Sha256(EncodeRow(columns));
    ASSIGN_OR_RETURN(
        Statement update,
        database_->Prepare("UPDATE lease SET expires_unix = ?6, "
                           "row_digest = ?7 WHERE key = ?1 AND boot = ?2 AND "
                           "pid = ?3 AND start_ticks = ?4 AND token = ?5"));
    BindOwned(key, owner_, &update);
    update.BindInteger(6, columns.expires_unix);
    update.BindBlob(7, row_digest.AsBytes());
    RETURN_IF_ERROR(update.Run());
  }
  return transaction.Commit();
}

absl::Status PlanCache::ReleaseLeases(absl::Span<const Digest> keys) {
  RETURN_IF_ERROR(RequireWritable());
  if (keys.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  for (const Digest& key : keys) {
    ASSIGN_OR_RETURN(
        Statement remove,
        database_->Prepare("DELETE FROM lease WHERE key = ?1 AND boot = ?2 AND "
                           "pid = ?3 AND start_ticks = ?4 AND token = ?5"));
    BindOwned(key, owner_, &remove);
    RETURN_IF_ERROR(remove.Run());
  }
  return transaction.Commit();
}

}  // namespace kiln
