// What an epoch needs of Iceberg in few calls from Python: each call of Python's costs a millisecond,
// and an epoch would need thousands. Janino, which Spark compiles its plans with, compiles this file
// when slottables starts (java.py): so it has no generics, no lambdas, and casts instead.

import java.io.IOException;
import java.sql.Connection;
import java.sql.Driver;
import java.sql.PreparedStatement;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.ServiceLoader;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.apache.iceberg.*;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.io.FileIO;
import org.apache.iceberg.io.LocationProvider;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.JsonNode;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.node.ArrayNode;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.node.ObjectNode;

public class TableFiles {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final ExecutorService POOL = Executors.newCachedThreadPool(new Daemons());

  // ---- what a table has --------------------------------------------------------------------

  /**
   * Tables as they are now, at once: what their writer compares, and names of files that it may
   * write. null for one that can't be read. `branch`: how the names of branches begin.
   */
  public String looks(Map tables, final String branch) throws Exception {
    TreeMap futures = new TreeMap();
    for (Iterator i = tables.keySet().iterator(); i.hasNext();) {
      String key = (String) i.next();
      final Table table = (Table) tables.get(key);
      futures.put(key, POOL.submit(new Callable() {
        public Object call() { return look(table, branch); }
      }));
    }
    ObjectNode found = JSON.createObjectNode();
    for (Iterator i = futures.keySet().iterator(); i.hasNext();) {
      String key = (String) i.next();
      try {
        found.set(key, (JsonNode) result((Future) futures.get(key)));
      } catch (Exception error) {
        found.putNull(key);
      }
    }
    return found.toString();
  }

  private static ObjectNode look(Table table, String branch) {
    table.refresh();
    TableMetadata now = ((HasTableOperations) table).operations().current();
    ObjectNode found = JSON.createObjectNode();
    found.put("uuid", now.uuid());
    found.put("metadata", now.metadataFileLocation());
    found.put("format", now.formatVersion());
    found.put("spec", now.defaultSpecId());
    boolean partitioned = false;
    for (Iterator i = now.specs().iterator(); i.hasNext();)
      partitioned |= ((PartitionSpec) i.next()).isPartitioned();
    found.put("partitioned", partitioned);
    found.put("sorted", now.sortOrder().isSorted());
    found.put("schema", SchemaParser.toJson(now.schema()));
    texts(now.properties(), found.putObject("properties"));
    Snapshot snapshot = now.currentSnapshot();
    if (snapshot != null) found.put("snapshot", snapshot.snapshotId());
    ObjectNode summary = found.putObject("summary");
    if (snapshot != null) texts(snapshot.summary(), summary);
    ArrayNode branches = found.putArray("branches");
    for (Iterator i = now.refs().keySet().iterator(); i.hasNext();) {
      String name = (String) i.next();
      if (name.startsWith(branch)) branches.add(name);
    }
    LocationProvider places = table.locationProvider();
    found.put("data_path", places.newDataLocation(UUID.randomUUID() + ".parquet"));
    found.put("vector_path", places.newDataLocation(UUID.randomUUID() + "-deletes.puffin"));
    return found;
  }

  private static void texts(Map values, ObjectNode into) {
    for (Iterator i = values.entrySet().iterator(); i.hasNext();) {
      Map.Entry one = (Map.Entry) i.next();
      into.put((String) one.getKey(), (String) one.getValue());
    }
  }

  /** The files of a snapshot: {"data": [...], "deletes": [...]}, as ContentFileParser writes them. */
  public String listed(Table table, long snapshot) throws IOException {
    ObjectNode found = JSON.createObjectNode();
    ArrayNode data = found.putArray("data"), deletes = found.putArray("deletes");
    CloseableIterable tasks = table.newScan().useSnapshot(snapshot).planFiles();
    try {
      for (Iterator i = tasks.iterator(); i.hasNext();) {
        FileScanTask task = (FileScanTask) i.next();
        data.add(described(table, (ContentFile) task.file()));
        for (Iterator j = task.deletes().iterator(); j.hasNext();)
          deletes.add(described(table, (ContentFile) j.next()));
      }
    } finally {
      tasks.close();
    }
    return found.toString();
  }

  /**
   * What each snapshot after `before`, up to `snapshot`, has changed, the oldest first; null where
   * that does not descend from `before`, or is more than `most` snapshots away.
   */
  public String changes(Table table, long before, long snapshot, int most) throws IOException {
    ArrayList chain = new ArrayList();
    Snapshot at = table.snapshot(snapshot);
    while (at == null || at.snapshotId() != before) {
      if (at == null || chain.size() == most) return null;
      chain.add(0, at);
      at = at.parentId() == null ? null : table.snapshot(at.parentId().longValue());
    }
    ArrayNode found = JSON.createArrayNode();
    for (int i = 0; i < chain.size(); i++) {
      SnapshotChanges one =
          SnapshotChanges.builderFor(table).snapshot((Snapshot) chain.get(i)).build();
      ObjectNode node = found.addObject();
      all(table, node.putArray("added"), one.addedDataFiles());
      all(table, node.putArray("removed"), one.removedDataFiles());
      all(table, node.putArray("removed_deletes"), one.removedDeleteFiles());
      all(table, node.putArray("added_deletes"), one.addedDeleteFiles());
    }
    return found.toString();
  }

  private static void all(Table table, ArrayNode into, Iterable files) throws IOException {
    for (Iterator i = files.iterator(); i.hasNext();)
      into.add(described(table, (ContentFile) i.next()));
  }

  private static JsonNode described(Table table, ContentFile file) throws IOException {
    PartitionSpec spec = (PartitionSpec) table.specs().get(Integer.valueOf(file.specId()));
    return JSON.readTree(ContentFileParser.toJson((ContentFile) file.copyWithoutStats(), spec));
  }

  // ---- commits -----------------------------------------------------------------------------

  /** Delete rows in one commit to a branch: {"branch", "snapshot", "deletes", "removed", "summary"}. */
  public void deleteRows(Table table, String text) throws IOException {
    JsonNode given = JSON.readTree(text);
    RowDelta delta = table.newRowDelta();
    delta.toBranch(at(given, "branch").asText());
    delta.validateFromSnapshot(at(given, "snapshot").asLong());
    fill(table, given, delta);
    delta.commit();
  }

  /**
   * Prepare the commits of tables, at once: {key: {"metadata", "add", "deletes", "removed",
   * "removed_data", "summary", "set", "unset", "tag"}}. Answer {key: {"snapshot"}}; of a
   * table that is another one than `metadata` names, null. Their transactions go into `prepared`.
   */
  public String prepare(Map tables, String text, Map prepared) throws Exception {
    final JsonNode given = JSON.readTree(text);
    TreeMap futures = new TreeMap();
    for (Iterator i = tables.keySet().iterator(); i.hasNext();) {
      final String key = (String) i.next();
      final Table table = (Table) tables.get(key);
      futures.put(key, POOL.submit(new Callable() {
        public Object call() throws Exception { return prepared(table, at(given, key)); }
      }));
    }
    ObjectNode found = JSON.createObjectNode();
    for (Iterator i = futures.keySet().iterator(); i.hasNext();) {
      String key = (String) i.next();
      BaseTransaction transaction = (BaseTransaction) result((Future) futures.get(key));
      if (transaction == null) {
        found.putNull(key);
        continue;
      }
      prepared.put(key, transaction);
      ObjectNode node = found.putObject(key);
      Snapshot snapshot = transaction.currentMetadata().currentSnapshot();
      if (snapshot == null) continue;
      node.put("snapshot", snapshot.snapshotId());
    }
    return found.toString();
  }

  /**
   * Prepare a snapshot without rows, whose summary has texts; null where the last one's number of
   * the given name is not lower.
   */
  public BaseTransaction record(Table table, String text, String name, long number)
      throws IOException {
    TableOperations ops = LocalOperations.of(((HasTableOperations) table).operations());
    BaseTransaction transaction = (BaseTransaction) Transactions.newTransaction(table.name(), ops);
    Snapshot last = transaction.startMetadata().currentSnapshot();
    String had = last == null ? null : (String) last.summary().get(name);
    if (had != null && Long.parseLong(had) >= number) return null;
    AppendFiles append = transaction.newFastAppend();
    JsonNode values = JSON.readTree(text);
    for (Iterator i = values.fieldNames(); i.hasNext();) {
      String one = (String) i.next();
      append.set(one, at(values, one).asText());
    }
    append.commit();
    return transaction;
  }

  private static Object prepared(Table table, JsonNode given) throws Exception {
    TableOperations ops = LocalOperations.of(((HasTableOperations) table).operations());
    BaseTransaction transaction = (BaseTransaction) Transactions.newTransaction(table.name(), ops);
    TableMetadata before = transaction.startMetadata();
    if (!at(given, "metadata").asText().equals(before.metadataFileLocation())) return null;
    if (at(given, "add").size() + at(given, "deletes").size() + at(given, "removed_data").size() > 0) {
      RowDelta delta = transaction.newRowDelta();
      if (before.currentSnapshot() != null)
        delta.validateFromSnapshot(before.currentSnapshot().snapshotId());
      fill(table, given, delta);
      delta.commit(); // one operation of a transaction at a time
    }
    UpdateProperties update = transaction.updateProperties();
    JsonNode set = at(given, "set");
    for (Iterator i = set.fieldNames(); i.hasNext();) {
      String name = (String) i.next();
      update.set(name, at(set, name).asText());
    }
    JsonNode unset = at(given, "unset");
    for (int i = 0; i < unset.size(); i++) update.remove(((JsonNode) unset.get(i)).asText());
    update.commit();
    TableMetadata now = transaction.currentMetadata();
    if (now.currentSnapshot() != null) {
      String tag = at(given, "tag").asText();
      long number = now.currentSnapshot().snapshotId();
      ManageSnapshots manage = transaction.manageSnapshots();
      if (now.ref(tag) == null) manage.createTag(tag, number); else manage.replaceTag(tag, number);
      manage.commit();
    }
    return transaction;
  }

  private static void fill(Table table, JsonNode given, RowDelta delta) {
    for (Iterator i = files(table, given, "add"); i.hasNext();) delta.addRows((DataFile) i.next());
    for (Iterator i = files(table, given, "deletes"); i.hasNext();)
      delta.addDeletes((DeleteFile) i.next());
    for (Iterator i = files(table, given, "removed"); i.hasNext();)
      delta.removeDeletes((DeleteFile) i.next());
    for (Iterator i = files(table, given, "removed_data"); i.hasNext();)
      delta.removeRows((DataFile) i.next());
    JsonNode summary = at(given, "summary");
    for (Iterator i = summary.fieldNames(); i.hasNext();) {
      String name = (String) i.next();
      delta.set(name, at(summary, name).asText());
    }
  }

  private static Iterator files(Table table, JsonNode given, String name) {
    ArrayList found = new ArrayList();
    JsonNode all = given.has(name) ? at(given, name) : JSON.createArrayNode();
    for (int i = 0; i < all.size(); i++)
      found.add(ContentFileParser.fromJson((JsonNode) all.get(i), table.specs()));
    return found.iterator();
  }

  // ---- a JDBC catalog's transaction of several tables -----------------------------------------

  /** Write the metadata file that a transaction leads to; its location. */
  public String write(BaseTransaction transaction) {
    TableOperations ops = transaction.underlyingOps();
    TableMetadata now = transaction.currentMetadata();
    BaseMetastoreTableOperations known = (BaseMetastoreTableOperations) LocalOperations.under(ops);
    String ending =
        TableMetadataParser.getFileExtension(now.property("write.metadata.compression-codec", "none"));
    String number = String.valueOf(100000 + known.currentVersion() + 1).substring(1);
    String place = ops.temp(now).metadataFileLocation(number + "-" + UUID.randomUUID() + ending);
    TableMetadataParser.overwrite(now, LocalOperations.of(ops).io().newOutputFile(place));
    return place;
  }

  /**
   * Execute a statement for each of several rows of texts, in one transaction, with the first driver
   * that takes the URI; whether each has changed one row. If it has not, nothing is changed.
   */
  public boolean updateAll(String uri, Properties options, String update, String rows)
      throws Exception {
    Connection database = null;
    ClassLoader loader = Thread.currentThread().getContextClassLoader();
    // By the driver itself: DriverManager has none that came by spark.jars.
    Iterator drivers = ServiceLoader.load(Driver.class, loader).iterator();
    while (database == null) database = ((Driver) drivers.next()).connect(uri, options);
    try {
      database.setAutoCommit(false);
      PreparedStatement statement = database.prepareStatement(update);
      for (Iterator i = JSON.readTree(rows).iterator(); i.hasNext();) {
        JsonNode row = (JsonNode) i.next();
        for (int j = 0; j < row.size(); j++)
          statement.setString(j + 1, ((JsonNode) row.get(j)).asText());
        if (statement.executeUpdate() != 1) {
          database.rollback();
          return false;
        }
      }
      database.commit();
      return true;
    } finally {
      database.close();
    }
  }

  /** Remove the metadata files that tables do not name any more, as each commit does. */
  public void removeOld(List transactions) {
    for (Iterator i = transactions.iterator(); i.hasNext();) {
      BaseTransaction one = (BaseTransaction) i.next();
      FileIO files = one.underlyingOps().io();
      CatalogUtil.deleteRemovedMetadataFiles(files, one.startMetadata(), one.currentMetadata());
    }
  }

  /** Remove what the new snapshots of transactions have written that were certainly not committed. */
  public void removeNew(List transactions) {
    for (Iterator i = transactions.iterator(); i.hasNext();) {
      BaseTransaction one = (BaseTransaction) i.next();
      FileIO files = one.underlyingOps().io();
      for (Iterator j = one.currentMetadata().snapshots().iterator(); j.hasNext();) {
        Snapshot snapshot = (Snapshot) j.next();
        if (one.startMetadata().snapshot(snapshot.snapshotId()) != null) continue;
        for (Iterator k = snapshot.allManifests(files).iterator(); k.hasNext();) {
          ManifestFile manifest = (ManifestFile) k.next();
          if (manifest.snapshotId().longValue() == snapshot.snapshotId())
            files.deleteFile(manifest.path());
        }
        files.deleteFile(snapshot.manifestListLocation());
      }
    }
  }

  private static JsonNode at(JsonNode node, String name) {
    return (JsonNode) node.get(name); // Janino asks for the cast
  }

  private static Object result(Future future) throws Exception {
    try {
      return future.get();
    } catch (ExecutionException error) {
      if (error.getCause() instanceof Exception) throw (Exception) error.getCause();
      throw error;
    }
  }
}

class Daemons implements java.util.concurrent.ThreadFactory {
  public Thread newThread(Runnable work) {
    Thread thread = new Thread(work, "slottables commits");
    thread.setDaemon(true);
    // A daemon's own loader may be that of the system, which lacks what came by spark.jars.
    thread.setContextClassLoader(TableFiles.class.getClassLoader());
    return thread;
  }
}
