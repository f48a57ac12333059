// Files of this machine, written without Hadoop (TableFiles.java).

import java.io.BufferedOutputStream;
import java.io.File;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.util.Map;
import org.apache.iceberg.*;
import org.apache.iceberg.encryption.EncryptionManager;
import org.apache.iceberg.io.FileIO;
import org.apache.iceberg.io.InputFile;
import org.apache.iceberg.io.LocationProvider;
import org.apache.iceberg.io.OutputFile;
import org.apache.iceberg.io.PositionOutputStream;

/**
 * A table's operations, whose new files in folders of this machine are written by Java itself:
 * Hadoop, without its native library, starts a process (chmod) for each file that it writes.
 */
public class LocalOperations implements TableOperations {
  private final TableOperations ops;

  private LocalOperations(TableOperations ops) { this.ops = ops; }

  public static TableOperations of(TableOperations ops) {
    boolean hadoop = ops.io().getClass().getName().equals("org.apache.iceberg.hadoop.HadoopFileIO");
    return hadoop ? new LocalOperations(ops) : ops;
  }

  public static TableOperations under(TableOperations ops) {
    return ops instanceof LocalOperations ? ((LocalOperations) ops).ops : ops;
  }

  public TableMetadata current() { return ops.current(); }
  public TableMetadata refresh() { return ops.refresh(); }
  public void commit(TableMetadata before, TableMetadata now) { ops.commit(before, now); }
  public FileIO io() { return new LocalFiles(ops.io()); }
  public EncryptionManager encryption() { return ops.encryption(); }
  public String metadataFileLocation(String name) { return ops.metadataFileLocation(name); }
  public LocationProvider locationProvider() { return ops.locationProvider(); }
  public TableOperations temp(TableMetadata now) { return new LocalOperations(ops.temp(now)); }
  public long newSnapshotId() { return ops.newSnapshotId(); }
  public boolean requireStrictCleanup() { return ops.requireStrictCleanup(); }
}

class LocalFiles implements FileIO {
  private final FileIO files;

  LocalFiles(FileIO files) { this.files = files; }

  public InputFile newInputFile(String path) { return files.newInputFile(path); }
  public void deleteFile(String path) { files.deleteFile(path); }
  public Map properties() { return files.properties(); }

  public OutputFile newOutputFile(String path) {
    if (path.startsWith("/")) return new LocalFile(files, path, new File(path));
    if (path.startsWith("file:")) return new LocalFile(files, path, new File(path.substring(5)));
    return files.newOutputFile(path);
  }
}

class LocalFile implements OutputFile {
  private final FileIO files;
  private final String path;
  private final File file;

  LocalFile(FileIO files, String path, File file) {
    this.files = files;
    this.path = path;
    this.file = file;
  }

  public PositionOutputStream create() {
    if (file.exists()) throw new org.apache.iceberg.exceptions.AlreadyExistsException("%s", new Object[] {path});
    return createOrOverwrite();
  }

  public PositionOutputStream createOrOverwrite() {
    try {
      file.getParentFile().mkdirs();
      return new Positioned(new BufferedOutputStream(new FileOutputStream(file), 65536));
    } catch (IOException error) {
      throw new org.apache.iceberg.exceptions.RuntimeIOException(error);
    }
  }

  public String location() { return path; }
  public InputFile toInputFile() { return files.newInputFile(path); }
}

class Positioned extends PositionOutputStream {
  private final OutputStream out;
  private long at;

  Positioned(OutputStream out) { this.out = out; }

  public long getPos() { return at; }
  public void write(int one) throws IOException { out.write(one); at++; }
  public void write(byte[] some, int first, int count) throws IOException {
    out.write(some, first, count);
    at += count;
  }
  public void flush() throws IOException { out.flush(); }
  public void close() throws IOException { out.close(); }
}
